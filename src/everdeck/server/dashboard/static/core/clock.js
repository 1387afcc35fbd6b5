// The server's time, and one tick a second for everything that shows an age.
let skewMs = 0;
const tickers = new Set();

export function setServerTime(iso) {
  const at = Date.parse(iso);
  if (Number.isFinite(at)) skewMs = at - Date.now();
}

export const serverNow = () => Date.now() + skewMs;

/** Call `tick` once a second until the returned function is called. */
export function everySecond(tick) {
  tickers.add(tick);
  return () => tickers.delete(tick);
}

setInterval(() => {
  if (document.visibilityState === 'visible') for (const tick of [...tickers]) tick();
}, 1000);
