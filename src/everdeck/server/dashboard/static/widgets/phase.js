// A worker's state as a phase of the moon: full while it runs, new while it is stopped, waxing and waning between.
// Shape and word carry the meaning; colour only repeats it.
import { html } from '../core/html.js';

const SHAPES = {
  running: html`<circle cx="8" cy="8" r="6" class="ph-fill" />`,
  starting: html`<circle cx="8" cy="8" r="5.25" class="ph-ring" /><path d="M8 2.75a5.25 5.25 0 0 1 0 10.5z" class="ph-fill" />`,
  stopping: html`<circle cx="8" cy="8" r="5.25" class="ph-ring" /><path d="M8 2.75a5.25 5.25 0 0 0 0 10.5z" class="ph-fill" />`,
  stopped: html`<circle cx="8" cy="8" r="5.25" class="ph-ring" />`,
  exited: html`<circle cx="8" cy="8" r="5.25" class="ph-ring" /><circle cx="8" cy="8" r="1.75" class="ph-fill" />`,
  backoff: html`<circle cx="8" cy="8" r="5.25" class="ph-ring ph-dashed" /><circle cx="8" cy="2.75" r="2" class="ph-fill" />`,
  unhealthy: html`<circle cx="8" cy="8" r="6" class="ph-fill" /><path d="M8 4.6v4M8 10.9v.1" class="ph-cut" />`,
  failed: html`<circle cx="8" cy="8" r="6" class="ph-fill" /><path d="M5.9 5.9l4.2 4.2M10.1 5.9l-4.2 4.2" class="ph-cut" />`,
};

export const Phase = ({ state, size = 16 }) => html`
  <svg class="phase state-${state}" width=${size} height=${size} viewBox="0 0 16 16" aria-hidden="true">${SHAPES[state] || SHAPES.exited}</svg>`;

/** The phase and its word. */
export const StateWord = ({ state }) => html`<span class="state-word state-${state}"><${Phase} state=${state} size=${12} />${state}</span>`;
