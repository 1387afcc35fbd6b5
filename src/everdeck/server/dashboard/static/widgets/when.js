// Relative times that grow older by themselves, with the absolute time on hover.
// They write their own text node once a second, so that a table of them costs no render.
import { html, useEffect, useRef } from '../core/html.js';
import { everySecond, serverNow } from '../core/clock.js';
import { absolute, ago, duration } from '../core/format.js';

function useTickingText(text, key) {
  const node = useRef(null);
  useEffect(() => {
    const write = () => {
      const next = text();
      if (node.current && node.current.textContent !== next) node.current.textContent = next;
    };
    write();
    return everySecond(write);
  }, [key]);
  return node;
}

/** <When at=iso/> → "3m ago" */
export function When({ at }) {
  const moment = Date.parse(at);
  const node = useTickingText(() => ago(moment, serverNow()), at);
  if (!Number.isFinite(moment)) return html`<span class="quiet">–</span>`;
  return html`<time class="when" ref=${node} datetime=${at} title=${absolute(at)}></time>`;
}

/** <Uptime since=iso/> → "2h 5m" */
export function Uptime({ since }) {
  const moment = Date.parse(since);
  const node = useTickingText(() => duration((serverNow() - moment) / 1000), since);
  if (!Number.isFinite(moment)) return html`<span class="quiet">–</span>`;
  return html`<time class="when" ref=${node} datetime=${since} title=${`since ${absolute(since)}`}></time>`;
}

/** <Countdown until=iso/> → "in 4s", then "any moment" */
export function Countdown({ until }) {
  const moment = Date.parse(until);
  const node = useTickingText(() => {
    const left = Math.ceil((moment - serverNow()) / 1000);
    return left > 0 ? `in ${duration(left)}` : 'any moment';
  }, until);
  return html`<time class="when" ref=${node} datetime=${until} title=${absolute(until)}></time>`;
}
