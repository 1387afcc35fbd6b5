// The events of one worker, newest first, live.
import { html, useEffect, useState } from '../core/html.js';
import { api } from '../core/api.js';
import { onEvent } from '../core/deck.js';
import { link } from '../core/router.js';
import { EventRow } from './event-row.js';

const SHOWN = 60;

export function Timeline({ name }) {
  const [events, setEvents] = useState(null);
  useEffect(() => {
    let live = true;
    const merge = (more) => live && setEvents((before) => {
      const byId = new Map([...(before || []), ...more].map((event) => [event.id, event]));
      return [...byId.values()].sort((a, b) => b.id - a.id).slice(0, SHOWN);
    });
    const stop = onEvent((event) => event.worker === name && merge([event]));
    api.events({ worker: name, last: SHOWN }).then(merge, () => merge([]));
    return () => {
      live = false;
      stop();
    };
  }, [name]);
  return html`
    <section class="panel timeline" aria-label="Events of ${name}">
      <header class="panel-head"><h2>Events</h2><a href=${link('/events', { worker: name })}>All of them</a></header>
      ${events === null ? html`<p class="panel-empty">Reading…</p>` : events.length === 0 ? html`<p class="panel-empty">Nothing has happened yet.</p>` : html`
        <div class="timeline-list" tabindex="0" role="group" aria-label="Events, newest first">${events.map((event) => html`<${EventRow} key=${event.id} event=${event} withWorker=${false} />`)}</div>`}
    </section>`;
}
