// The table of workers: columns, sorting by header, groups, selection, and the row the keyboard is on.
import { html, classes, useCallback, useEffect, useMemo, useRef, useState } from '../core/html.js';
import { useCell } from '../core/cell.js';
import { lastLines, showing, sparks } from '../core/deck.js';
import { whole } from '../core/format.js';
import { useKeys } from '../core/keys.js';
import { go } from '../core/router.js';
import { extend, select, selection, toggle } from '../core/selection.js';
import { Icon } from './icons.js';
import { act } from './verbs.js';
import { reveal, Virtual } from './virtual.js';
import { WorkerRow } from './worker-row.js';

const COLUMNS = [
  ['name', 'Worker', 'c-name'], [null, 'Pid', 'c-pid num'], ['uptime', 'Uptime', 'c-uptime num'], ['restarts', 'Restarts', 'c-restarts num'], [null, 'Health', 'c-health'],
  ['cpu', 'CPU', 'c-cpu'], ['rss', 'Memory', 'c-rss'], [null, 'Last exit', 'c-exit'], [null, 'Last line', 'c-line'],
];
const WIDE = matchMedia('(min-width: 720px)');
// Row heights follow the size of letters, which grows on very large screens.
const heightsNow = (dense) => {
  const rem = Number.parseFloat(getComputedStyle(document.documentElement).fontSize);
  return WIDE.matches ? { worker: Math.round((dense ? 2.3 : 3.72) * rem), group: Math.round(2.86 * rem) } : { worker: Math.round((dense ? 4.9 : 7.5) * rem), group: 44 };
};

/** groups: [{label|null, statuses}], already filtered and sorted. */
export function WorkerTable({ groups, sort, order, onSort, dense }) {
  const frame = useRef(null);
  const selected = useCell(selection);
  const [active, setActive] = useState(null);
  const [folded, setFolded] = useState(() => new Set());
  const [sizes, setSizes] = useState(() => heightsNow(dense));
  const sparkOf = useCell(sparks);
  const lineOf = useCell(lastLines);

  useEffect(() => {
    const change = () => setSizes((before) => {
      const next = heightsNow(dense);
      return next.worker === before.worker && next.group === before.group ? before : next;
    });
    change();
    addEventListener('resize', change);
    return () => removeEventListener('resize', change);
  }, [dense]);

  const items = useMemo(() => {
    const list = [];
    for (const { label, statuses } of groups) {
      if (label !== null) list.push({ group: label, count: statuses.length });
      if (label === null || !folded.has(label)) for (const status of statuses) list.push({ status });
    }
    return list;
  }, [groups, folded]);
  const heights = useMemo(() => items.map((item) => (item.status ? sizes.worker : sizes.group)), [items, sizes]);
  const names = useMemo(() => items.filter((item) => item.status).map((item) => item.status.name), [items]);
  const grouped = groups.length > 0 && groups[0].label !== null;

  let at = items.findIndex((item) => item.status && item.status.name === active);
  const firstWorker = items.findIndex((item) => item.status);

  const move = (step) => {
    if (!names.length) return;
    let next = at < 0 ? (step > 0 ? -1 : items.length) : at;
    do next += step; while (items[next] && !items[next].status);
    if (!items[next]) return;
    at = next;
    setActive(items[next].status.name);
    reveal(frame.current, heights, next, 120, 90);
    focusRow(items[next].status.name);
  };
  const focusRow = (name) => requestAnimationFrame(() => requestAnimationFrame(() => {
    frame.current?.querySelector(`[data-worker="${CSS.escape(name)}"]`)?.focus({ preventScroll: true });
  }));
  const chosen = () => (selection.value.size ? [...selection.value] : at >= 0 ? [active] : []);
  // A row is drawn again only when what it shows has changed, so what it calls must not grow old with it.
  const shown = useRef(names);
  shown.current = names;
  const onSelect = useCallback((name, range) => (range ? extend(name, shown.current) : toggle(name)), []);
  const onAct = useCallback((verb, name) => act(verb, [name]), []);

  useKeys('Deck', {
    j: ['Next worker', () => move(1)],
    k: ['Previous worker', () => move(-1)],
    Enter: ['Open the worker', (press) => {
      if (press.target.closest('a, button, input')) press.target.click();
      else if (at >= 0) go(`/workers/${encodeURIComponent(active)}`);
    }],
    ' ': ['Select or unselect', (press) => { if (press.target.closest('button, input')) press.target.click(); else if (at >= 0) toggle(active); }],
    s: ['Start the worker, or all selected', () => act('start', chosen())],
    x: ['Stop it', () => act('stop', chosen())],
    r: ['Restart it', () => act('restart', chosen())],
    e: ['Reset it after its breaker tripped', () => act('reset', chosen())],
    Delete: ['Remove it', () => act('remove', chosen())],
    Escape: ['Clear the selection', () => select([])],
    a: ['Select all that are shown', () => select(names.every((name) => selection.value.has(name)) ? [] : names)],
  });

  const arrow = (press) => {
    if (press.key === 'ArrowDown' || press.key === 'ArrowUp') {
      press.preventDefault();
      move(press.key === 'ArrowDown' ? 1 : -1);
    }
  };

  const some = names.some((name) => selected.has(name));
  const all = some && names.every((name) => selected.has(name));
  return html`
    <div class=${classes('worker-table', grouped && 'is-grouped', dense && 'is-dense')} role="grid" aria-label="Workers" aria-rowcount=${items.length + 1} aria-multiselectable="true" onKeyDown=${arrow}>
      <div role="rowgroup" class="table-head-group"><div role="row" class="table-head" aria-rowindex="1">
        <div role="columnheader" class="c-pick"><label class="pick"><input type="checkbox" checked=${all} indeterminate=${some && !all} aria-label="Select all shown"
          onClick=${() => select(all ? [] : names)} /></label></div>
        ${COLUMNS.map(([key, title, className]) => html`
          <div role="columnheader" key=${title} class=${className} aria-sort=${key && sort === key ? (order === 'desc' ? 'descending' : 'ascending') : undefined}>
            ${key ? html`<button class="sort-button" onClick=${() => onSort(key)}>${title}<span class="sort-mark" aria-hidden="true">${sort === key ? (order === 'desc' ? '↓' : '↑') : ''}</span></button>` : title}
          </div>`)}
        <div role="columnheader" class="c-acts"><span class="unseen">Actions</span></div>
      </div></div>
      <div role="rowgroup" ref=${frame}>
        <${Virtual} heights=${heights} keep=${at} role="presentation"
          onRange=${(first, last) => showing(items.slice(first, last + 1).filter((item) => item.status).map((item) => item.status.name))}
          row=${(i, { transform, height }) => {
            const item = items[i];
            if (!item) return null;
            if (!item.status) {
              const shut = folded.has(item.group);
              return html`
                <div role="row" key=${`group ${item.group}`} class="group-row" style=${{ transform, height }} aria-rowindex=${i + 2}>
                  <div role="gridcell"><button class="group-button" aria-expanded=${shut ? 'false' : 'true'} onClick=${() => {
                    const next = new Set(folded);
                    if (!next.delete(item.group)) next.add(item.group);
                    setFolded(next);
                  }}><${Icon} name=${shut ? 'right' : 'down'} size=${14} />${item.group || 'no template'} <span class="quiet">${whole(item.count)}</span></button></div>
                </div>`;
            }
            const { status } = item;
            return html`<${WorkerRow} key=${status.name} status=${status} index=${i} transform=${transform} height=${height}
              spark=${sparkOf.get(status.name)} line=${lineOf.get(status.name)} grouped=${grouped}
              selected=${selected.has(status.name)} active=${at >= 0 ? status.name === active : i === firstWorker}
              onSelect=${onSelect} onActivate=${setActive} onAct=${onAct} />`;
          }} />
      </div>
    </div>`;
}
