// The durable event stream, newest first: filterable, linkable, live.
import { html, classes, useEffect, useMemo, useRef, useState } from '../core/html.js';
import { api } from '../core/api.js';
import { connection, onEvent } from '../core/deck.js';
import { useCell } from '../core/cell.js';
import { KINDS } from '../core/fold.js';
import { plural, whole } from '../core/format.js';
import { useKeys } from '../core/keys.js';
import { refine } from '../core/router.js';
import { EventRow, toneOf } from '../widgets/event-row.js';
import { Icon } from '../widgets/icons.js';
import { Virtual } from '../widgets/virtual.js';
import { Moon } from './deck.js';

const PAGE = 300;
const MOST = 5000;
const WIDE = matchMedia('(min-width: 720px)');

export function EventsView({ params }) {
  const { worker = '', kind = '', id = '' } = params;
  const [events, setEvents] = useState(null);
  const [problem, setProblem] = useState(null);
  const [more, setMore] = useState(true);
  const [wide, setWide] = useState(WIDE.matches);
  // What is being typed is kept here: an event that comes in meanwhile draws the page anew, and must not empty the box.
  const [typed, setTyped] = useState(worker);
  const box = useRef(null);
  const { phase } = useCell(connection);
  const kinds = useMemo(() => new Set(kind.split(',').filter(Boolean)), [kind]);
  const wanted = useRef(null);
  wanted.current = (event) => (!worker || event.worker === worker) && (!kinds.size || kinds.has(event.kind));

  useEffect(() => { document.title = 'Events · Everdeck'; }, []);
  useEffect(() => { setTyped(worker); }, [worker]);
  useEffect(() => {
    const change = () => setWide(WIDE.matches);
    WIDE.addEventListener('change', change);
    return () => WIDE.removeEventListener('change', change);
  }, []);
  useKeys('Events', { '/': ['Filter by worker', () => box.current?.focus()] });

  const merge = (fresh) => setEvents((before) => {
    const byId = new Map((before || []).map((event) => [event.id, event]));
    for (const event of fresh) byId.set(event.id, event);
    return [...byId.values()].sort((a, b) => b.id - a.id);
  });
  // A page that stays open for days keeps the newest; older ones can be read again.
  const mergeNew = (fresh) => {
    merge(fresh);
    setEvents((before) => (before.length > MOST ? before.slice(0, MOST) : before));
  };
  const read = async (before) => {
    try {
      const page = await api.events({ last: PAGE, before, worker, kind });
      merge(page);
      setMore(page.length >= PAGE);
      setProblem(null);
    } catch (failure) {
      setProblem(failure);
    }
  };
  useEffect(() => {
    setEvents(null);
    setMore(true);
    // A link to one event shows it among its neighbours.
    read(id ? Number(id) + 40 : undefined);
  }, [worker, kind, id]);
  useEffect(() => {
    let fresh = [];
    let timer = 0;
    const stop = onEvent((event) => {
      if (!wanted.current(event)) return;
      fresh.push(event);
      timer ||= setTimeout(() => { timer = 0; mergeNew(fresh.splice(0)); }, 150);
    });
    return () => {
      stop();
      clearTimeout(timer);
    };
  }, []);

  const list = events || [];
  const height = Math.round(Number.parseFloat(getComputedStyle(document.documentElement).fontSize) * (wide ? 2.7 : 4.3));
  const heights = useMemo(() => new Array(list.length).fill(height), [list.length, height]);
  const toggle = (name) => {
    const next = new Set(kinds);
    if (!next.delete(name)) next.add(name);
    refine({ kind: [...next].join(','), id: '' });
  };
  const marked = Number(id) || null;
  return html`
    <div class=${classes('events-view', phase === 'lost' && 'is-stale')}>
      <header class="events-head">
        <h1>Events</h1>
        <p class="quiet">Every event is kept, with an id that grows by one. An address of this page keeps its filters.</p>
        <div class="deck-tools">
          <label class="search-box"><${Icon} name="search" size=${15} /><span class="unseen">Only this worker</span>
            <input type="search" ref=${box} placeholder="Only this worker" value=${typed} onInput=${(e) => setTyped(e.target.value)} onChange=${(e) => refine({ worker: e.target.value.trim(), id: '' })} /><kbd aria-hidden="true">/</kbd></label>
          ${(worker || kind || id) && html`<button class="toggle" onClick=${() => refine({ worker: '', kind: '', id: '' })}>Clear filters</button>`}
          <span class="shown-count num" role="status">${events ? plural(list.length, 'event') : ''}${more && events ? ' loaded' : ''}</span>
        </div>
        <div class="kind-chips" role="group" aria-label="Filter by kind">
          ${KINDS.map((name) => html`<button key=${name} class=${classes('chip', `tone-${toneOf(name)}`, kinds.has(name) && 'is-on')} aria-pressed=${kinds.has(name) ? 'true' : 'false'} onClick=${() => toggle(name)}><span class="event-dot" aria-hidden="true"></span>${name}</button>`)}
        </div>
      </header>
      ${problem && !list.length ? html`<div class="state-page is-small" role="alert"><h2>The events cannot be read</h2><p>${problem.message}</p><button class="button" onClick=${() => read()}>Try again</button></div>`
        : events === null ? html`<div class="skeleton" role="status" aria-label="Reading events">${Array.from({ length: 12 }, (_, i) => html`<div class="bone is-line" key=${i}></div>`)}</div>`
        : !list.length ? html`<div class="state-page is-small"><${Moon} phase="new" /><h2>No such event yet</h2><p>${worker || kind ? 'Nothing fits these filters.' : 'As soon as something happens to a worker it is kept here.'}</p></div>`
        : html`
          <div class="event-list" role="feed" aria-label="Events, newest first" aria-busy="false">
            <${Virtual} heights=${heights} keep=${-1} row=${(i, style) => list[i] && html`<${EventRow} key=${list[i].id} event=${list[i]} style=${style} marked=${list[i].id === marked} aria-posinset=${i + 1} aria-setsize=${more ? -1 : list.length} tabindex="0" />`} />
          </div>
          ${more && html`<p class="more"><button class="button" onClick=${() => read(list.at(-1).id)}>Older events than #${whole(list.at(-1).id)}</button></p>`}`}
    </div>`;
}
