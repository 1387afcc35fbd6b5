// The tide gauge: how the deck stands, as one line of water, and a filter for each state under it.
import { html, classes } from '../core/html.js';
import { STATES } from '../core/fold.js';
import { whole } from '../core/format.js';
import { Phase } from './phase.js';

/** counts: {state: n}; chosen: Set of states; onChoose(state) toggles. */
export function Gauge({ counts, total, chosen, onChoose }) {
  const present = STATES.filter((state) => counts[state] > 0 || chosen.has(state));
  return html`
    <div class="gauge">
      <div class="gauge-line" aria-hidden="true">
        ${STATES.filter((state) => counts[state] > 0).map((state) => html`
          <span key=${state} class=${classes('gauge-part', `state-${state}`, chosen.size && !chosen.has(state) && 'is-dim')} style=${{ flexGrow: String(Math.max(counts[state], total * 0.006)) }}></span>`)}
      </div>
      <div class="gauge-legend" role="group" aria-label="Filter by state">
        ${present.map((state) => html`
          <button key=${state} class=${classes('chip', chosen.has(state) && 'is-on')} aria-pressed=${chosen.has(state) ? 'true' : 'false'} data-state=${state} onClick=${() => onChoose(state)}>
            <${Phase} state=${state} size=${12} /><span class="chip-count">${whole(counts[state] || 0)}</span> ${state}
          </button>`)}
      </div>
    </div>`;
}
