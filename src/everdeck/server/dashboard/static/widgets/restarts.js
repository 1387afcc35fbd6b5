// Crashes within the breaker's window, how near the breaker is, and when the next start comes.
import { html, useEffect, useState } from '../core/html.js';
import { everySecond, serverNow } from '../core/clock.js';
import { absolute, plural, span } from '../core/format.js';
import { Countdown, When } from './when.js';

export function Restarts({ status, spec, crashTimes }) {
  const [now, setNow] = useState(serverNow());
  useEffect(() => everySecond(() => setNow(serverNow())), []);
  const policy = spec?.restart || {};
  const window = (policy.window_seconds || 300) * 1000;
  const crashes = (crashTimes || []).map((at) => (typeof at === 'number' ? at * 1000 : Date.parse(at))).filter(Number.isFinite);
  const inWindow = crashes.filter((at) => now - at <= window);
  const most = policy.max_crashes ?? 5;
  return html`
    <section class="panel restarts" aria-label="Restarts">
      <header class="panel-head"><h2>Restarts</h2><span class="quiet">${policy.policy || ''}</span></header>
      ${status.state === 'backoff' && status.backoff_until && html`<p class="restarts-next"><${BackoffRing} until=${status.backoff_until} now=${now} cap=${policy.backoff_cap_seconds || 60} />Next start <b><${Countdown} until=${status.backoff_until} /></b></p>`}
      ${status.state === 'failed' && status.health !== 'broken' && html`<p class="restarts-next state-failed">The breaker is open: it crashed more than ${plural(most, 'time')} in ${span(window / 1000)} and waits for you. Reset starts afresh.</p>`}
      <svg class="crash-strip" viewBox="0 0 300 26" preserveAspectRatio="none" role="img" aria-label="${plural(inWindow.length, 'crash', 'crashes')} in the last ${span(window / 1000)}">
        <path d="M0 13H300" class="strip-line" />
        ${inWindow.map((at) => html`<rect key=${at} x=${300 - ((now - at) / window) * 300 - 1.5} y="4" width="3" height="18" rx="1.5" class="strip-crash"><title>${absolute(at)}</title></rect>`)}
      </svg>
      <p class="strip-scale quiet"><span>${span(window / 1000)} ago</span><span>now</span></p>
      <dl class="facts is-tight">
        <div><dt>Crashes in the window</dt><dd class="num">${inWindow.length} of ${most} allowed</dd></div>
        <div><dt>Restarts, all told</dt><dd class="num">${status.restarts}</dd></div>
        <div><dt>Last crash</dt><dd>${crashes.length ? html`<${When} at=${new Date(Math.max(...crashes)).toISOString()} />` : 'never'}</dd></div>
      </dl>
    </section>`;
}

function BackoffRing({ until, now, cap }) {
  const left = Math.max(0, Math.min(1, (Date.parse(until) - now) / 1000 / cap));
  return html`<svg class="backoff-ring" viewBox="0 0 20 20" width="20" height="20" aria-hidden="true"><circle cx="10" cy="10" r="8" class="ring-track" /><circle cx="10" cy="10" r="8" class="ring-left" pathLength="100" stroke-dasharray="${(left * 100).toFixed(1)} 100" /></svg>`;
}
