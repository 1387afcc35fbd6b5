// One worker: how it is, what it prints, what protects it. Each part is a widget of its own.
import { html, useEffect, useState } from '../core/html.js';
import { api, may } from '../core/api.js';
import { useCell } from '../core/cell.js';
import { connection, learn, onEvent, showing, workers } from '../core/deck.js';
import { bytes, exit, percent } from '../core/format.js';
import { useKeys } from '../core/keys.js';
import { go, link } from '../core/router.js';
import { Feed } from '../widgets/feed.js';
import { Holds } from '../widgets/holds.js';
import { Icon } from '../widgets/icons.js';
import { Layers } from '../widgets/layers.js';
import { Log } from '../widgets/log.js';
import { Phase } from '../widgets/phase.js';
import { Plots } from '../widgets/plots.js';
import { ProcessTree } from '../widgets/process-tree.js';
import { Restarts } from '../widgets/restarts.js';
import { EnvKeys, SpecFacts } from '../widgets/spec-facts.js';
import { Timeline } from '../widgets/timeline.js';
import { act, allowed, VERBS } from '../widgets/verbs.js';
import { Countdown, Uptime } from '../widgets/when.js';
import { Moon } from './deck.js';

const EVERY_MS = 5000;

export function WorkerView({ name }) {
  const detail = useDetail(name);
  const row = useCell(workers).get(name);
  const { phase } = useCell(connection);
  const status = row || detail.value?.status;
  const spec = detail.value?.spec;

  useEffect(() => { document.title = `${name} · Everdeck`; }, [name]);
  useEffect(() => { showing([name]); }, [name]);
  const run = async (verb) => {
    const done = await act(verb, [name]);
    if (done && verb === 'remove') go('/');
  };
  useKeys('Worker', {
    s: ['Start', () => run('start')],
    x: ['Stop', () => run('stop')],
    r: ['Restart', () => run('restart')],
    e: ['Reset', () => run('reset')],
    Delete: ['Remove', () => run('remove')],
    Escape: ['Back to the deck', () => go('/')],
  });

  if (detail.problem && !detail.value) {
    const gone = detail.problem.status === 404;
    return html`<div class="state-page" role="alert"><${Moon} phase=${gone ? 'new' : 'lost'} />
      <h1>${gone ? `No worker “${name}”` : 'This worker cannot be read'}</h1><p>${detail.problem.message}</p>
      <p class="state-page-acts"><a class="button is-primary" href=${link('/')}>Back to the deck</a> ${gone && html`<a class="button" href=${link('/events', { worker: name })}>Its events</a>`}</p></div>`;
  }
  if (!status) return html`<div class="skeleton" role="status" aria-label="Reading ${name}"><div class="bone is-title"></div><div class="bone is-gauge"></div><div class="bone is-paper"></div></div>`;
  return html`
    <div class=${phase === 'lost' ? 'worker-view is-stale' : 'worker-view'}>
      <header class="worker-head">
        <a class="back" href=${link('/')}><${Icon} name="back" size=${14} />Deck</a>
        <div class="worker-title">
          <${Phase} state=${status.state} size=${26} />
          <div><h1>${name}</h1>
            <p class="worker-standing"><span class="state-text state-${status.state}">${status.state}</span>
              ${status.state === 'backoff' && status.backoff_until && html` · starts again <${Countdown} until=${status.backoff_until} />`}
              ${status.health && html` · <span class="worker-health">${status.health}</span>`}
              ${status.status_text && html` · <q class="status-text">${status.status_text}</q>`}</p></div>
        </div>
        <div class="worker-acts" role="toolbar" aria-label="Actions">
          ${Object.entries(VERBS).filter(([verb]) => allowed(verb)).map(([verb, { label, fits }]) => html`
            <button key=${verb} class=${verb === 'remove' ? 'button is-danger-quiet' : 'button'} data-verb=${verb} disabled=${!fits(status)} onClick=${() => run(verb)}><${Icon} name=${verb} size=${14} /><span>${label}</span></button>`)}
          ${may('admin') && html`
            <a class="button" href=${link('/add', { edit: name })}><${Icon} name="edit" size=${14} /><span>Edit</span></a>
            <a class="button" href=${link('/add', { clone: name })}><${Icon} name="clone" size=${14} /><span>Clone</span></a>`}
        </div>
      </header>
      <${Facts} status=${status} />
      <div class="worker-grid">
        <div class="worker-main"><${Log} name=${name} key=${name} /><${Timeline} name=${name} key=${`t ${name}`} /></div>
        <div class="worker-side">
          <${Plots} name=${name} alive=${Boolean(status.pid)} key=${name} />
          ${spec?.satellite && html`<${Feed} name=${name} key=${`f ${name}`} />`}
          ${detail.value && html`
            <${Layers} layers=${detail.value.layers} />
            <${Holds} holds=${detail.value.holds} />
            <${ProcessTree} tree=${detail.value.tree} />
            <${Restarts} status=${status} spec=${spec} crashTimes=${detail.value.crash_times} />
            <${EnvKeys} spec=${spec} />
            <${SpecFacts} spec=${spec} />`}
        </div>
      </div>
    </div>`;
}

function Facts({ status }) {
  const end = exit(status.exit, status.state === 'stopped');
  const facts = [
    ['Pid', status.pid ?? '–'],
    ['Uptime', status.pid ? html`<${Uptime} since=${status.started_at} />` : '–'],
    ['CPU', percent(status.cpu_percent)],
    ['Memory', bytes(status.rss_bytes)],
    ['Restarts', status.restarts],
    ['Last exit', html`<span class="tone-${end.tone}">${end.text}</span>`],
    ['Lifetime', status.lifetime],
    ['Origin', status.adopted ? 'adopted' : 'own'],
    ['Contained by', status.containment || '–'],
    ...(status.port ? [['Port', status.port]] : []),
  ];
  return html`<dl class="fact-strip">${facts.map(([title, value]) => html`<div key=${title}><dt>${title}</dt><dd class="num">${value}</dd></div>`)}</dl>`;
}

/** Read again when something happened to this worker, and now and then for its processes. */
function useDetail(name) {
  const [state, setState] = useState({ value: null, problem: null });
  useEffect(() => {
    const ending = new AbortController();
    let soon = 0;
    const read = async () => {
      soon = 0;
      if (document.visibilityState !== 'visible') return;
      try {
        const value = await api.detail(name, ending.signal);
        learn(value.status);
        setState({ value, problem: null });
      } catch (problem) {
        if (problem.name !== 'AbortError') setState((before) => ({ value: problem.status === 404 ? null : before.value, problem }));
      }
    };
    setState({ value: null, problem: null });
    read();
    const timer = setInterval(read, EVERY_MS);
    const stop = onEvent((event) => { if (event.worker === name) soon ||= setTimeout(read, 250); });
    return () => {
      ending.abort();
      clearInterval(timer);
      clearTimeout(soon);
      stop();
    };
  }, [name]);
  return state;
}
