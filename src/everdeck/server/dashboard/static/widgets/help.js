// The keyboard, shown by "?": exactly the keys that are heard right now. Under it: which deck this is, and the way out.
import { html, useEffect, useRef } from '../core/html.js';
import { cell, useCell } from '../core/cell.js';
import { api, me } from '../core/api.js';
import { about } from '../core/deck.js';
import { knownKeys } from '../core/keys.js';
import { Icon } from './icons.js';
import { ThemeSwitch } from './theme-switch.js';

const shown = cell(false);
export const showHelp = () => shown.set(true);

const NAMES = { ' ': 'Space', ArrowDown: '↓', ArrowUp: '↑', Escape: 'Esc' };

export function Help() {
  const open = useCell(shown);
  const deck = useCell(about);
  const who = useCell(me);
  const dialog = useRef(null);
  useEffect(() => {
    if (open && dialog.current && !dialog.current.open) dialog.current.showModal();
  }, [open]);
  if (!open) return null;
  const close = () => {
    dialog.current?.close();
    shown.set(false);
  };
  return html`
    <dialog class="dialog help" ref=${dialog} aria-labelledby="help-title" onClose=${close}
      onClick=${(e) => e.target === dialog.current && close()}>
      <div class="dialog-body">
        <div class="help-head"><h2 id="help-title">Keyboard</h2><span class="help-theme"><${ThemeSwitch} /></span>
          <button class="icon-button" aria-label="Close" onClick=${close}><${Icon} name="close" /></button></div>
        <div class="help-groups">
        ${knownKeys().map(({ group, keys }) => html`
          <section key=${group}><h3>${group}</h3><dl>
            ${keys.map(({ key, label }) => html`<div key=${key}><dt><kbd>${NAMES[key] || key}</kbd></dt><dd>${label}</dd></div>`)}
          </dl></section>`)}
        </div>
        <p class="help-foot quiet">${deck && html`<span>Everdeck ${deck.version}, ${deck.state_dir}, owned by pid ${deck.owner_pid}</span>`}
          ${who && html`<span>You are “${who.name}”, role ${who.role}${Object.keys(who.labels).length ? `, for workers with ${Object.entries(who.labels).map(([k, v]) => `${k}=${v}`).join(', ')}` : ''}</span>`}
          <button class="link-button" onClick=${() => { close(); api.logout().catch(() => {}); }}>Log out</button></p>
      </div>
    </dialog>`;
}
