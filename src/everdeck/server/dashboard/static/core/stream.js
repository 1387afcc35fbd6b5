// A server-sent stream that comes back by itself. The browser's own reconnection is not used: it does not
// tell why a stream ended, cannot be seen waiting, and never notices a peer that fell silent.
//
// Stands on: the daemon sends a `ping` at least every ten seconds; thirty silent seconds mean a dead connection.
const SILENCE_MS = 30_000;
const RETRY_MS = [250, 500, 1000, 2000, 3000, 5000];

/**
 * Open a stream and keep it open until `close()`.
 * `address()` is asked at every attempt, so it can name the point to resume from.
 * `names` are the SSE event names to hear besides the unnamed ones.
 * `onState({phase, retryAt})` hears 'connecting', 'live' and 'lost'.
 */
export function keepStream({ address, names = [], onMessage, onState }) {
  let source = null;
  let retryTimer = 0;
  let silenceTimer = 0;
  let failures = 0;
  let closed = false;

  const drop = () => {
    clearTimeout(silenceTimer);
    source?.close();
    source = null;
  };

  const lose = () => {
    drop();
    if (closed) return;
    const pause = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
    failures += 1;
    onState({ phase: 'lost', retryAt: Date.now() + pause });
    clearTimeout(retryTimer);
    retryTimer = setTimeout(connect, pause);
  };

  const heard = () => {
    clearTimeout(silenceTimer);
    silenceTimer = setTimeout(lose, SILENCE_MS);
  };

  const connect = () => {
    if (closed) return;
    clearTimeout(retryTimer);
    drop();
    onState({ phase: 'connecting', retryAt: null });
    source = new EventSource(address(), { withCredentials: true });
    const receive = (message) => {
      heard();
      if (message.type !== 'ping') onMessage(message);
    };
    source.onopen = () => {
      failures = 0;
      heard();
      onState({ phase: 'live', retryAt: null });
    };
    source.onmessage = receive;
    for (const name of [...names, 'ping']) source.addEventListener(name, receive);
    source.onerror = lose;
  };

  connect();
  return {
    retryNow() { failures = 0; connect(); },
    close() {
      closed = true;
      clearTimeout(retryTimer);
      drop();
    },
  };
}
