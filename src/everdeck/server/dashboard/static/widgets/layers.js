// The four layers that keep this worker from being lost or run twice: which hold here, how strongly, and why.
// Drawn as orbits around the worker: an unbroken orbit holds.
import { html, classes } from '../core/html.js';

const NAMES = {
  L1: ['Lifeline', 'a pipe whose end means the owner died'],
  L2: ['Singleton', 'a lock the worker itself carries'],
  L3: ['Escalation', 'SIGTERM, grace, SIGKILL to the whole tree'],
  L4: ['Reap at start', 'what an earlier owner left is found again'],
};

export function Layers({ layers }) {
  const known = layers || [];
  return html`
    <section class="panel layers" aria-label="Protection">
      <header class="panel-head"><h2>Protection</h2><span class="quiet">${known.filter((layer) => layer.holds).length} of ${known.length} layers hold</span></header>
      <div class="layers-body">
        <svg class="orbits" viewBox="0 0 120 120" aria-hidden="true">
          <circle cx="60" cy="60" r="9" class="orbit-core" />
          ${known.map((layer, i) => html`<g key=${layer.layer} class=${classes('orbit', layer.holds && 'holds')}>
            <circle cx="60" cy="60" r=${20 + i * 12} class="orbit-ring" /><circle cx=${60 + (20 + i * 12) * Math.cos(-0.6 - i * 0.75)} cy=${60 + (20 + i * 12) * Math.sin(-0.6 - i * 0.75)} r="3" class="orbit-moon" /></g>`)}
        </svg>
        <ol class="layer-list">
          ${known.map((layer) => {
            const [title, meaning] = NAMES[layer.layer] || [layer.layer, ''];
            return html`<li key=${layer.layer} class=${classes('layer', layer.holds && 'holds')}>
              <p class="layer-title"><b>${layer.layer}</b> <span title=${meaning}>${title}</span> <span class="layer-verdict">${layer.holds ? layer.strength || 'holds' : 'does not apply'}</span></p>
              ${layer.why && html`<p class="layer-why">${layer.why}</p>`}</li>`;
          })}
        </ol>
      </div>
    </section>`;
}
