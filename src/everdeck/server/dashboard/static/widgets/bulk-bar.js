// What can be done to all selected workers at once.
import { html } from '../core/html.js';
import { plural, whole } from '../core/format.js';
import { link } from '../core/router.js';
import { Icon } from './icons.js';
import { act, allowed, VERBS } from './verbs.js';

export function BulkBar({ names, hidden, onClear }) {
  if (!names.length) return null;
  return html`
    <div class="bulk-bar" role="toolbar" aria-label="Selected workers">
      <span class="bulk-count">${plural(names.length, 'worker')} selected${hidden > 0 && html`<span class="quiet">, ${whole(hidden)} not shown</span>`}</span>
      ${Object.entries(VERBS).filter(([verb]) => allowed(verb)).map(([verb, { label }]) => html`
        <button key=${verb} class=${verb === 'remove' ? 'button is-small is-danger-quiet' : 'button is-small'} data-verb=${verb} onClick=${() => act(verb, names)}><${Icon} name=${verb} size=${14} /><span>${label}</span></button>`)}
      <a class="button is-small" href=${link('/logs', { names: names.join(',') })}><${Icon} name="logs" size=${14} /><span>Logs</span></a>
      <button class="icon-button" aria-label="Clear selection" onClick=${onClear}><${Icon} name="close" /></button>
    </div>`;
}
