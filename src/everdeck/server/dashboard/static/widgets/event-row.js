// One event, as the timeline of a worker and the events view show it.
import { html, classes } from '../core/html.js';
import { detail } from '../core/format.js';
import { link, linkToWorker } from '../core/router.js';
import { When } from './when.js';

const TONES = {
  crashed: 'bad', failed: 'bad', unhealthy: 'warn', killed: 'warn', 'lock-conflict': 'bad', 'orphan-reaped': 'warn',
  started: 'good', ready: 'good', restarted: 'good', adopted: 'tide', 'owner-changed': 'tide', reset: 'tide',
};
export const toneOf = (kind) => TONES[kind] || 'calm';

export function EventRow({ event, withWorker = true, marked, ...rest }) {
  return html`
    <article class=${classes('event', `tone-${toneOf(event.kind)}`, marked && 'is-marked')} data-event=${event.id} ...${rest}>
      <span class="event-dot" aria-hidden="true"></span>
      <span class="event-kind">${event.kind}</span>
      ${withWorker && (event.worker ? html`<a class="event-worker" href=${linkToWorker(event.worker)}>${event.worker}</a>` : html`<span class="event-worker quiet">the deck</span>`)}
      <span class="event-detail" title=${detail(event)}>${detail(event)}</span>
      <span class="event-when"><${When} at=${event.at} /></span>
      <a class="event-id num" href=${link('/events', { id: event.id })} aria-label="Link to event ${event.id}">#${event.id}</a>
    </article>`;
}
