// What the worker cannot do here, in plain words, and why where something does not hold. See docs/explanation/threat-model.md.
import { html, classes } from '../core/html.js';

export function Holds({ holds }) {
  const known = holds || [];
  if (!known.length) return null;
  return html`
    <section class="panel holds" aria-label="What it cannot do">
      <header class="panel-head"><h2>What it cannot do</h2><span class="quiet">${known.filter((one) => one.holds).length} of ${known.length} hold</span></header>
      <ul class="layer-list hold-list">
        ${known.map((one) => html`<li key=${one.what} class=${classes('layer', one.holds && 'holds')}>
          <p class="layer-title"><span>${one.what}</span> <span class="layer-verdict">${one.holds ? 'holds' : 'no'}</span></p>
          ${one.why && html`<p class="layer-why">${one.why}</p>`}</li>`)}
      </ul>
    </section>`;
}
