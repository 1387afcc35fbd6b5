// Every worker: the headline, the tide gauge, search, grouping, and the table.
import { html, useEffect, useMemo, useRef, useState } from '../core/html.js';
import { useCell } from '../core/cell.js';
import { may } from '../core/api.js';
import { about, loaded, readAll, workers } from '../core/deck.js';
import { ATTENTION, countStates } from '../core/fold.js';
import { bytes, percent, plural, whole } from '../core/format.js';
import { useKeys } from '../core/keys.js';
import { link, refine } from '../core/router.js';
import { select, selection } from '../core/selection.js';
import { BulkBar } from '../widgets/bulk-bar.js';
import { useStanding } from '../widgets/connection.js';
import { Gauge } from '../widgets/gauge.js';
import { Copyable } from '../widgets/copyable.js';
import { Icon } from '../widgets/icons.js';
import { quoted } from '../widgets/words.js';
import { WorkerTable } from '../widgets/worker-table.js';

const SORTS = { name: 'Name', state: 'Attention', uptime: 'Uptime', cpu: 'CPU', rss: 'Memory', restarts: 'Restarts' };
const DESCENDS = new Set(['cpu', 'rss', 'restarts', 'uptime']);

export function DeckView({ params }) {
  const rows = useCell(workers);
  const reading = useCell(loaded);
  const standing = useStanding();
  const box = useRef(null);
  const selected = useCell(selection);
  const [dense, setDense] = useRemembered('everdeck-dense', false);
  const { q = '', state = '', sort = 'name', group = '' } = params;
  const order = params.order || (DESCENDS.has(sort) ? 'desc' : 'asc');
  const chosen = useMemo(() => new Set(state.split(',').filter(Boolean)), [state]);

  useEffect(() => () => select([]), []);
  useKeys('Deck', { '/': ['Search', () => box.current?.focus()] });

  const all = [...rows.values()];
  const counts = countStates(all);
  // A page that is kept open is mostly seen as a tab.
  useEffect(() => { document.title = counts.failed ? `${plural(counts.failed, 'worker')} failed · Everdeck` : 'Deck · Everdeck'; }, [counts.failed]);
  const groups = grouped(sorted(filtered(all, q, chosen), sort, order), group);
  const shown = groups.reduce((n, { statuses }) => n + statuses.length, 0);
  const visible = new Set(selected.size ? groups.flatMap(({ statuses }) => statuses.map(({ name }) => name)) : []);

  const toggleState = (name) => {
    const next = new Set(chosen);
    if (!next.delete(name)) next.add(name);
    refine({ state: [...next].join(',') });
  };
  const sortBy = (key) => refine(key === sort ? { sort: key, order: order === 'asc' ? 'desc' : 'asc' } : { sort: key, order: '' });

  if (reading === 'loading') return html`<${Loading} />`;
  if (reading instanceof Error && !rows.size) {
    return html`<div class="state-page" role="alert"><${Moon} phase="lost" /><h1>The deck cannot be read</h1><p>${reading.message}</p><button class="button is-primary" onClick=${readAll}>Try again</button></div>`;
  }
  if (!rows.size) return html`<${EmptyDeck} />`;
  return html`
    <div class=${standing === 'lost' ? 'deck-view is-stale' : 'deck-view'}>
      <header class="deck-head">
        <${Headline} counts=${counts} total=${all.length} statuses=${all} />
        <${Gauge} counts=${counts} total=${all.length} chosen=${chosen} onChoose=${toggleState} />
        <div class="deck-tools">
          <label class="search-box"><${Icon} name="search" size=${15} /><span class="unseen">Search workers</span>
            <input type="search" ref=${box} placeholder="Search workers" value=${q} onInput=${(e) => refine({ q: e.target.value })} /><kbd aria-hidden="true">/</kbd></label>
          <label class="choice"><span>Sort</span><select value=${sort} onChange=${(e) => refine({ sort: e.target.value, order: '' })}>
            ${Object.entries(SORTS).map(([key, title]) => html`<option key=${key} value=${key} selected=${key === sort}>${title}</option>`)}</select></label>
          <button class="toggle" aria-pressed=${group ? 'true' : 'false'} onClick=${() => refine({ group: group ? '' : '1' })}>Group by template</button>
          <button class="toggle" aria-pressed=${dense ? 'true' : 'false'} onClick=${() => setDense(!dense)}><${Icon} name="rows" size=${14} />Dense</button>
          <span class="shown-count num" role="status">${shown === all.length ? '' : `${whole(shown)} of ${whole(all.length)} shown`}</span>
        </div>
      </header>
      ${shown === 0 ? html`<div class="state-page is-small"><h2>No worker matches</h2><p>Nothing in this deck fits the search and the filters.</p>
        <button class="button" onClick=${() => refine({ q: '', state: '' })}>Clear them</button></div>` : html`
        <${WorkerTable} groups=${groups} sort=${sort} order=${order} onSort=${sortBy} dense=${dense} />`}
      <${BulkBar} names=${[...selected]} hidden=${[...selected].filter((name) => !visible.has(name)).length} onClear=${() => select([])} />
    </div>`;
}

function Headline({ counts, total, statuses }) {
  const asking = [
    counts.failed && `${plural(counts.failed, 'worker')} failed and ${counts.failed === 1 ? 'waits' : 'wait'} for you`,
    counts.unhealthy && `${whole(counts.unhealthy)} unhealthy`,
    counts.backoff && `${whole(counts.backoff)} backing off`,
  ].filter(Boolean);
  return html`
    <div class="headline">
      <h1>${counts.running === total ? html`All <b>${whole(total)}</b> running` : html`<b>${whole(counts.running)}</b> of ${whole(total)} running`}</h1>
      <p class="headline-more">${asking.length ? asking.join(' · ') : 'Nothing needs you.'}</p>
      <p class="headline-totals num" title="All workers together">CPU ${percent(sum(statuses, 'cpu_percent'))} · ${bytes(sum(statuses, 'rss_bytes'))}</p>
    </div>`;
}

function EmptyDeck() {
  const deck = useCell(about);
  return html`
    <div class="state-page"><${Moon} phase="new" />
      <h1>No workers yet</h1>
      <p>One process per user, kept running, never run twice. Add the first one here, or from a shell:</p>
      <${Copyable} text=${`everdeck${deck?.state_dir ? ` --state ${quoted(deck.state_dir)}` : ''} start alice -- python3 bot.py`} />
      ${may('admin') && html`<a class="button is-primary" href=${link('/add')}><${Icon} name="plus" size=${14} />Add a worker</a>`}
    </div>`;
}

const Loading = () => html`
  <div class="skeleton" role="status" aria-label="Reading the deck">
    <div class="bone is-title"></div><div class="bone is-gauge"></div>
    ${Array.from({ length: 9 }, (_, i) => html`<div class="bone is-row" key=${i}></div>`)}
  </div>`;

export const Moon = ({ phase }) => html`
  <svg class="big-moon is-${phase}" viewBox="0 0 120 120" width="120" height="120" aria-hidden="true">
    <ellipse cx="60" cy="60" rx="54" ry="22" class="moon-orbit" transform="rotate(-18 60 60)" /><circle cx="60" cy="60" r="24" class="moon-planet" /><circle cx="110" cy="43" r="6" class="moon-sat" />
  </svg>`;

/** A choice that this browser remembers. */
function useRemembered(key, initial) {
  const [value, setValue] = useState(() => {
    try {
      return JSON.parse(localStorage.getItem(key)) ?? initial;
    } catch {
      return initial;
    }
  });
  const keep = (next) => {
    setValue(next);
    try {
      localStorage.setItem(key, JSON.stringify(next));
    } catch {
      // A browser that refuses storage remembers it until it is reloaded.
    }
  };
  return [value, keep];
}

// --- decisions, pure ---------------------------------------------------------------------------------------------

function filtered(statuses, q, states) {
  const wanted = q.trim().toLowerCase();
  return statuses.filter((status) => (!states.size || states.has(status.state)) && (!wanted || haystack(status).includes(wanted)));
}

const haystack = (status) => `${status.name} ${status.pid ?? ''} ${Object.entries(status.labels || {}).map(([key, value]) => `${key}=${value}`).join(' ')} ${status.status_text || ''}`.toLowerCase();

const sum = (statuses, key) => statuses.reduce((total, status) => total + (status[key] || 0), 0);

const KEYS = {
  state: (status) => ATTENTION[status.state] ?? 9,
  uptime: (status) => (status.pid && status.started_at ? -Date.parse(status.started_at) : -Infinity),
  cpu: (status) => status.cpu_percent ?? -1,
  rss: (status) => status.rss_bytes ?? -1,
  restarts: (status) => status.restarts,
};
const byName = new Intl.Collator('en', { numeric: true }).compare;

// Comparing two thousand names by their letters takes longer than all the rest of a render, and names seldom come or go.
let ranks = new Map();
function rankOf(statuses) {
  if (!statuses.every((status) => ranks.has(status.name))) {
    const names = [...new Set([...ranks.keys(), ...statuses.map((status) => status.name)])].sort(byName);
    ranks = new Map(names.map((name, i) => [name, i]));
  }
  return ranks;
}

function sorted(statuses, sort, order) {
  const sign = order === 'desc' ? -1 : 1;
  const key = KEYS[sort];
  const rank = rankOf(statuses);
  const compareNames = (a, b) => rank.get(a.name) - rank.get(b.name);
  if (!key) return statuses.sort((a, b) => sign * compareNames(a, b));
  return statuses.sort((a, b) => sign * (key(a) - key(b)) || compareNames(a, b));
}

function grouped(statuses, by) {
  if (!by) return [{ label: null, statuses }];
  const groups = new Map();
  for (const status of statuses) {
    const label = status.labels?.template || '';
    if (!groups.has(label)) groups.set(label, []);
    groups.get(label).push(status);
  }
  return [...groups].sort(([a], [b]) => (a === '') - (b === '') || byName(a, b)).map(([label, members]) => ({ label, statuses: members }));
}
