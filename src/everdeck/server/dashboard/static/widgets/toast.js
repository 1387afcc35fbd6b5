// Short notices of what was done. They are read out politely, wait while hovered, and leave by themselves.
import { html, useEffect } from '../core/html.js';
import { cell, useCell } from '../core/cell.js';
import { Icon } from './icons.js';

const notices = cell([]);
let next = 1;

/** say('alice stopped', {tone: 'bad', undo: {label, run}, stays}) → {close()} */
export function say(text, { tone = 'calm', undo = null, stays = false } = {}) {
  const notice = { id: next++, text, tone, undo, stays };
  notices.set([...notices.value.slice(-3), notice]);
  return { close: () => close(notice.id) };
}

const close = (id) => notices.set(notices.value.filter((notice) => notice.id !== id));

export function Toasts() {
  const shown = useCell(notices);
  return html`
    <div class="toasts" role="region" aria-label="Notices">
      <div aria-live="polite" aria-relevant="additions">
        ${shown.map((notice) => html`<${Notice} key=${notice.id} ...${notice} />`)}
      </div>
    </div>`;
}

function Notice({ id, text, tone, undo, stays }) {
  useEffect(() => {
    if (stays) return undefined;
    const timer = setTimeout(() => close(id), tone === 'bad' ? 12_000 : 5000);
    return () => clearTimeout(timer);
  }, [id]);
  return html`
    <div class="toast tone-${tone}">
      <span>${text}</span>
      ${undo && html`<button class="link-button" onClick=${() => { close(id); undo.run(); }}>${undo.label}</button>`}
      <button class="icon-button" aria-label="Dismiss" onClick=${() => close(id)}><${Icon} name="close" size=${14} /></button>
    </div>`;
}
