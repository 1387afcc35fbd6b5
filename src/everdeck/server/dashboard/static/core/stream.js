// A server-sent stream that comes back by itself. The browser's EventSource is not used: it can send no header with
// our session, does not tell why a stream ended, and never notices a peer that fell silent.
//
// Stands on: the daemon sends a `ping` at least every ten seconds; thirty silent seconds mean a dead connection.
import { open } from './api.js';

const SILENCE_MS = 30_000;
const RETRY_MS = [250, 500, 1000, 2000, 3000, 5000];

/**
 * Open a stream and keep it open until `close()`.
 * `address()` is asked at every attempt, so it can name the point to resume from.
 * `names` are the SSE event names to hear besides the unnamed ones; `onMessage({type, data})` gets each.
 * `onState({phase, retryAt})` hears 'connecting', 'live' and 'lost'.
 */
export function keepStream({ address, names = [], onMessage, onState }) {
  let request = null;
  let retryTimer = 0;
  let silenceTimer = 0;
  let failures = 0;
  let closed = false;
  const wanted = new Set(['message', ...names]);

  const drop = () => {
    clearTimeout(silenceTimer);
    request?.abort();
    request = null;
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
    const mine = new AbortController();
    request = mine;
    read(mine).catch(() => {}).finally(() => {
      if (request === mine) lose();
    });
  };

  const read = async (mine) => {
    const body = await open(address(), 'text/event-stream', mine.signal);
    failures = 0;
    heard();
    onState({ phase: 'live', retryAt: null });
    for await (const message of messages(body)) {
      if (request !== mine) return;
      heard();
      if (wanted.has(message.type)) onMessage(message);
    }
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

/** The events of a text/event-stream body (HTML standard, "Server-sent events"), as far as the daemon uses it. */
async function* messages(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (pending + value).split('\n\n');
    pending = blocks.pop();
    for (const block of blocks) {
      const message = { type: 'message', data: '' };
      for (const line of block.split('\n')) {
        if (line.startsWith('data: ')) message.data += line.slice(6);
        else if (line.startsWith('event: ')) message.type = line.slice(7);
      }
      if (message.data) yield message;
    }
  }
}
