// Several workers' logs together, as they are written.
import { html, useEffect } from '../core/html.js';
import { useKeys } from '../core/keys.js';
import { go, link, linkToWorker } from '../core/router.js';
import { plural } from '../core/format.js';
import { Icon } from '../widgets/icons.js';
import { Log } from '../widgets/log.js';

export function LogsView({ params }) {
  const names = (params.names || '').split(',').filter(Boolean);
  useEffect(() => { document.title = 'Logs · Everdeck'; }, []);
  useKeys('Logs', { Escape: ['Back to the deck', () => go('/')] });
  return html`
    <div class="logs-view">
      <header class="worker-head">
        <a class="back" href=${link('/')}><${Icon} name="back" size=${14} />Deck</a>
        <div><h1>${plural(names.length, 'log')} together</h1>
          <p class="worker-standing">${names.map((name, i) => html`${i > 0 && ', '}<a key=${name} href=${linkToWorker(name)}>${name}</a>`)}</p></div>
      </header>
      <${Log} names=${names} key=${names.join()} />
    </div>`;
}
