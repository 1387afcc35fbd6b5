// Add a worker: from a template or from a command. The daemon validates; its answer names the field, and the error
// is shown at that field. Nothing is checked twice here, so the rules live in one place.
import { html, classes, useEffect, useRef, useState } from '../core/html.js';
import { api } from '../core/api.js';
import { useCell } from '../core/cell.js';
import { about, learn } from '../core/deck.js';
import { go, link, linkToWorker } from '../core/router.js';
import { ask } from '../widgets/confirm.js';
import { Field, Pairs } from '../widgets/fields.js';
import { Icon } from '../widgets/icons.js';
import { say } from '../widgets/toast.js';
import { quoted, split } from '../widgets/words.js';

const SANDBOXES = [['off', 'off: what its account may do'], ['basic', 'basic: gains no privileges'], ['strict', 'strict: its own directories and listed ports only']];
const FRESH = {
  kind: 'telegram', options: [], to: '', name: '', template: '', command: '', cwd: null, lifetime: 'adoptable', port: false, env: [], secrets: [], labels: [],
  policy: 'on-failure', max_crashes: '', window_seconds: '', backoff_seconds: '', grace_seconds: '', signal: '',
  health: 'none', health_target: '', interval_seconds: '', watchdog_seconds: '', memory_mb: '', pids: '', open_files: '', nice: '', sandbox: 'off',
};

export function AddView({ params }) {
  const [templates, setTemplates] = useState(null);
  const [mode, setMode] = useState('command');
  const [form, setForm] = useState({ ...FRESH, template: params.template || '' });
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const [base, setBase] = useState(null);
  const like = params.edit || params.clone;
  const element = useRef(null);
  const place = useCell(about)?.directory || '';
  const set = (key) => (value) => setForm((before) => ({ ...before, [key]: value }));

  useEffect(() => {
    document.title = `${params.edit ? `Edit ${params.edit}` : params.clone ? `Clone ${params.clone}` : 'Add a worker'} · Everdeck`;
    if (like) {
      api.spec(like).then((spec) => {
        setBase(spec);
        setForm({ ...formOf(spec), name: params.edit || '' });
        setTemplates([]);
      }, (failure) => { setProblem(failure); setTemplates([]); });
      return;
    }
    api.templates().then((list) => {
      if (list.length) {
        setMode('template');
        setForm((before) => ({ ...before, template: before.template || list[0].name }));
      }
      setTemplates(list);
    }, () => setTemplates([]));
  }, []);

  // The browser's own autofocus works once per document, and this view comes and goes.
  const asked = templates !== null;
  useEffect(() => { if (asked) element.current?.querySelector(params.edit ? '[name=command]' : '[name=name]')?.focus(); }, [asked]);
  // Bring the reader to the first refused field.
  useEffect(() => {
    if (problem) (element.current?.querySelector('[aria-invalid=true]') || element.current?.querySelector('.form-problem'))?.focus();
  }, [problem]);

  const submit = async (e, replace = false) => {
    e?.preventDefault();
    setBusy(true);
    setProblem(null);
    try {
      const status = await api.add(requestOf(mode, form, place, base), replace);
      learn(status);
      say(`${status.name} started`);
      go(`/workers/${encodeURIComponent(status.name)}`);
    } catch (failure) {
      setBusy(false);
      if (failure.type === 'urn:everdeck:spec-changed' && !replace) {
        const again = await ask({ title: `Replace ${form.name}?`, text: `It is known with another spec${failure.fields.length ? ` (different: ${failure.fields.join(', ')})` : ''}. Replacing it stops what runs now.`, confirm: 'Stop it and replace it', danger: true });
        if (again) submit(null, true);
        return;
      }
      setProblem(failure);
    }
  };

  // The form appears once it is known whether there are templates, so that nothing moves under the reader's hands.
  if (templates === null) return html`<div class="skeleton add-view" role="status" aria-label="Reading templates"><div class="bone is-title"></div><div class="bone is-row"></div><div class="bone is-row"></div></div>`;
  const template = templates.find(({ name }) => name === form.template);
  const errorFor = (...fields) => (problem?.field && fields.some((field) => problem.field === field || problem.field.startsWith(`${field}[`) || problem.field.startsWith(`${field}.`)) ? problem.message : null);
  const placed = problem && element.current && ANCHORS.some((field) => errorFor(field));
  const words = split(form.command);
  return html`
    <div class="add-view">
      <header><h1>${params.edit ? `Edit ${params.edit}` : params.clone ? `Clone ${params.clone}` : 'Add a worker'}</h1>
        <p class="quiet">${params.edit ? 'It is started with the new spec; if it runs now, you are asked before it is stopped.' : params.clone ? 'A new worker with the same spec. Values of secrets are not copied: give them again.' : 'It starts at once, and is kept running until somebody stops it.'}</p></header>
      <form class="add-form" ref=${element} onSubmit=${submit} novalidate>
        ${problem && !placed && html`<div class="form-problem banner tone-bad" role="alert" tabindex="-1"><p><strong>${problem.title || 'Not added'}.</strong> ${problem.message}</p></div>`}
        <fieldset class="panel"><legend>Who</legend>
          <${Field} label="Name" name="name" value=${form.name} onInput=${set('name')} error=${errorFor('name')} hint="Usually a user id: letters, digits and . _ - @ : +" autocomplete="off" spellcheck=${false} readonly=${Boolean(params.edit)} />
        </fieldset>
        <fieldset class="panel"><legend>What it runs</legend>
          <div class="segments" role="radiogroup" aria-label="Made from">
            ${[['template', 'A template'], ['command', 'A command'], ['satellite', 'A satellite']].map(([key, title]) => html`
              <label key=${key} class=${classes('segment', mode === key && 'is-on')}><input type="radio" name="mode" value=${key} checked=${mode === key} disabled=${(key === 'template' && templates.length === 0) || (key !== 'command' && Boolean(like))} onChange=${() => setMode(key)} />${title}</label>`)}
          </div>
          ${mode === 'template' ? html`
            <div class=${classes('field', errorFor('template') && 'is-wrong')}><label for="f-template">Template</label>
              <select id="f-template" name="template" value=${form.template} aria-invalid=${errorFor('template') ? 'true' : undefined} onChange=${(e) => set('template')(e.target.value)}>
                ${templates.map(({ name }) => html`<option key=${name} value=${name} selected=${name === form.template}>${name}</option>`)}</select>
              ${errorFor('template', 'command') && html`<p class="field-error" role="alert">${errorFor('template', 'command')}</p>`}
              ${template?.spec?.command && html`<p class="field-hint"><code>${template.spec.command.join(' ')}</code></p>`}
            </div>` : mode === 'satellite' ? html`<${SatelliteFields} form=${form} set=${set} errorFor=${errorFor} />` : html`
            <${Field} label="Command" name="command" value=${form.command} onInput=${set('command')} error=${errorFor('command') || (words.open ? 'A quote is not closed.' : null)} mono placeholder="python3 bot.py --user alice" spellcheck=${false} autocomplete="off"
              hint=${words.words.length ? html`Runs as ${words.words.map((word, i) => html`<code class="word" key=${i}>${word}</code>`)}` : 'The program and its arguments, quoted as in a shell. No shell is started.'} />
            <${Field} label="Working directory" name="cwd" value=${form.cwd ?? place} onInput=${set('cwd')} error=${errorFor('cwd')} mono spellcheck=${false} autocomplete="off" hint="Where the command finds its files. Empty: the worker's own data directory." />`}
        </fieldset>
        <fieldset class="panel"><legend>Its environment</legend>
          <${Pairs} title="Variables" name="env" pairs=${form.env} onPairs=${set('env')} error=${errorFor('env')} keyLabel="Variable" />
          ${mode !== 'template' && html`
            <${Pairs} title="Secrets" name="secrets" pairs=${form.secrets} onPairs=${set('secrets')} error=${errorFor('secrets')} keyLabel="Secret" secret hint=${params.edit ? 'A value that is left empty stays as it is.' : 'Reach the worker as files in $CREDENTIALS_DIRECTORY; never shown again.'} />`}
        </fieldset>
        ${mode === 'command' && html`
        <fieldset class="panel"><legend>When the owner dies</legend>
          <div class="cards" role="radiogroup" aria-label="Lifetime">
            ${[['adoptable', 'Adoptable', 'It keeps running, and the next owner takes it over.'], ['bound', 'Bound', 'It ends with the owner, whether it cooperates or not.']].map(([key, title, text]) => html`
              <label key=${key} class=${classes('card', form.lifetime === key && 'is-on')}><input type="radio" name="lifetime" value=${key} checked=${form.lifetime === key} onChange=${() => set('lifetime')(key)} /><span><b>${title}</b><span>${text}</span></span></label>`)}
          </div>
        </fieldset>
        <details class="panel more-fields" open=${Boolean(problem?.field && /^(restart|stop|health|limits|labels|port|sandbox)/.test(problem.field)) || undefined}><summary>Policies, health and limits</summary>
          <div class="field-grid">
            <div class=${classes('field', errorFor('restart.policy') && 'is-wrong')}><label for="f-policy">Restart</label><select id="f-policy" name="restart.policy" value=${form.policy} onChange=${(e) => set('policy')(e.target.value)}>${['on-failure', 'always', 'never'].map((policy) => html`<option key=${policy} selected=${policy === form.policy}>${policy}</option>`)}</select>
              ${errorFor('restart.policy') && html`<p class="field-error" role="alert">${errorFor('restart.policy')}</p>`}</div>
            <${Field} label="Crashes allowed" name="restart.max_crashes" value=${form.max_crashes} onInput=${set('max_crashes')} error=${errorFor('restart.max_crashes')} placeholder="5" inputmode="numeric" />
            <${Field} label="within seconds" name="restart.window_seconds" value=${form.window_seconds} onInput=${set('window_seconds')} error=${errorFor('restart.window_seconds')} placeholder="300" inputmode="numeric" />
            <${Field} label="First backoff, seconds" name="restart.backoff_seconds" value=${form.backoff_seconds} onInput=${set('backoff_seconds')} error=${errorFor('restart.backoff_seconds', 'restart.backoff_cap_seconds')} placeholder="1" inputmode="decimal" />
            <${Field} label="Stop signal" name="stop.signal" value=${form.signal} onInput=${set('signal')} error=${errorFor('stop.signal')} placeholder="TERM" />
            <${Field} label="Grace, seconds" name="stop.grace_seconds" value=${form.grace_seconds} onInput=${set('grace_seconds')} error=${errorFor('stop.grace_seconds')} placeholder="5" inputmode="decimal" />
            <div class="field"><label for="f-health">Health check</label><select id="f-health" value=${form.health} onChange=${(e) => set('health')(e.target.value)}>${[['none', 'none'], ['notify', 'READY=1 (sd_notify)'], ['http', 'HTTP'], ['tcp', 'TCP'], ['command', 'a command']].map(([key, title]) => html`<option key=${key} value=${key} selected=${key === form.health}>${title}</option>`)}</select></div>
            ${['http', 'tcp', 'command'].includes(form.health) && html`<${Field} label="Check" name="health.${form.health}" value=${form.health_target} onInput=${set('health_target')} error=${errorFor(`health.${form.health}`, 'health')} mono placeholder=${{ http: 'http://127.0.0.1:$PORT/healthz', tcp: '127.0.0.1:$PORT', command: 'test -f ready' }[form.health]} />`}
            ${form.health !== 'none' && html`<${Field} label="Watchdog, seconds" name="health.watchdog_seconds" value=${form.watchdog_seconds} onInput=${set('watchdog_seconds')} error=${errorFor('health.watchdog_seconds')} placeholder="none" inputmode="decimal" />`}
            <${Field} label="Memory limit, MB" name="limits.memory_bytes" value=${form.memory_mb} onInput=${set('memory_mb')} error=${errorFor('limits.memory_bytes')} placeholder="none" inputmode="numeric" />
            <${Field} label="Open files" name="limits.open_files" value=${form.open_files} onInput=${set('open_files')} error=${errorFor('limits.open_files')} placeholder="none" inputmode="numeric" />
            <${Field} label="Nice" name="limits.nice" value=${form.nice} onInput=${set('nice')} error=${errorFor('limits.nice')} placeholder="0" inputmode="numeric" />
          </div>
          <div class=${classes('field', errorFor('sandbox') && 'is-wrong')}><label for="f-sandbox">Sandbox</label><select id="f-sandbox" name="sandbox" value=${form.sandbox} aria-invalid=${errorFor('sandbox') ? 'true' : undefined} onChange=${(e) => set('sandbox')(e.target.value)}>${SANDBOXES.map(([level, title]) => html`<option key=${level} value=${level} selected=${level === form.sandbox}>${title}</option>`)}</select>
            ${errorFor('sandbox') && html`<p class="field-error" role="alert">${errorFor('sandbox')}</p>`}</div>
          <label class="check"><input type="checkbox" name="port" checked=${form.port} onChange=${(e) => set('port')(e.target.checked)} />Give it a port in <code>$PORT</code></label>
          <${Pairs} title="Labels" name="labels" pairs=${form.labels} onPairs=${set('labels')} error=${errorFor('labels')} keyLabel="Label" />
        </details>`}
        <div class="form-acts"><button class="button is-primary" disabled=${busy}><${Icon} name="start" size=${14} />${busy ? 'Starting…' : params.edit ? 'Save and start' : 'Add and start'}</button><a class="button" href=${like ? linkToWorker(like) : link('/')}>Cancel</a></div>
      </form>
    </div>`;
}

/** Which account a satellite joins. Its token or password is a secret, and is never shown again. */
function SatelliteFields({ form, set, errorFor }) {
  const [kinds, setKinds] = useState([]);
  useEffect(() => { api.satellites().then(setKinds, () => {}); }, []);
  const kind = kinds.find((one) => one.name === form.kind);
  const choose = (name) => {
    set('kind')(name);
    const wanted = kinds.find((one) => one.name === name)?.secrets.slice(0, 1) || [];
    set('secrets')(wanted.map((key) => [key, '']));
  };
  useEffect(() => { if (kinds.length && !form.secrets.length) choose(form.kind); }, [kinds]);
  return html`
    <div class="field"><label for="f-kind">Kind</label><select id="f-kind" name="kind" value=${form.kind} onChange=${(e) => choose(e.target.value)}>${kinds.map((one) => html`<option key=${one.name} value=${one.name} selected=${one.name === form.kind}>${one.name}</option>`)}</select>
      ${kind && html`<p class="field-hint">${kind.text}${kind.secrets.length ? `; secrets: ${kind.secrets.join(', ')}` : ''}</p>`}</div>
    <${Pairs} title="Options" name="options" pairs=${form.options} onPairs=${set('options')} error=${errorFor('satellite', 'satellite.options')} keyLabel="Option" hint=${kind ? `Known: ${Object.keys(Object.values(kind.options.$defs)[0].properties).join(', ')}` : ''} />
    <${Field} label="Messages go to" name="to" value=${form.to} onInput=${set('to')} error=${errorFor('to', 'satellite.to')} mono placeholder="your program: deck.messages()" hint="A URL or module:function. Empty: your program reads them." />`;
}

const ANCHORS = [
  'satellite', 'satellite.options', 'to', 'satellite.to', 'name', 'template', 'command', 'cwd', 'env', 'secrets', 'restart.policy', 'restart.max_crashes', 'restart.window_seconds', 'restart.backoff_seconds',
  'restart.backoff_cap_seconds', 'stop.signal', 'stop.grace_seconds', 'health', 'limits.memory_bytes', 'limits.open_files', 'limits.nice', 'labels', 'sandbox',
];

// --- the request, pure -------------------------------------------------------------------------------------------

/** A number where a number was typed; what else was typed goes to the daemon as it is, which refuses it by name. */
const number = (text) => (text.trim() !== '' && Number.isFinite(Number(text)) ? Number(text) : text.trim());

function some(entries) {
  const given = Object.entries(entries).filter(([, value]) => value !== '' && value !== undefined && value !== null);
  return given.length ? Object.fromEntries(given) : undefined;
}

const mapping = (pairs) => (pairs.length ? Object.fromEntries(pairs.filter(([key, value]) => key || value)) : undefined);

/** What the form shows of a spec. What it cannot show is kept in the spec itself, see requestOf. */
function formOf(spec) {
  const text = (value) => (value === null || value === undefined ? '' : String(value));
  const { restart = {}, stop = {}, limits = {}, health } = spec;
  const kind = !health ? 'none' : ['http', 'tcp', 'command'].find((each) => health[each]) || 'notify';
  const target = health?.[kind];
  return {
    ...FRESH, command: spec.command.map(quoted).join(' '), cwd: text(spec.cwd), lifetime: spec.lifetime, port: spec.port,
    env: Object.entries(spec.env), labels: Object.entries(spec.labels), secrets: Object.keys(spec.secrets).map((key) => [key, '']),
    policy: restart.policy, max_crashes: text(restart.max_crashes), window_seconds: text(restart.window_seconds), backoff_seconds: text(restart.backoff_seconds),
    grace_seconds: text(stop.grace_seconds), signal: text(stop.signal), health: kind, health_target: kind === 'notify' || kind === 'none' ? '' : Array.isArray(target) ? target.map(quoted).join(' ') : text(target),
    watchdog_seconds: text(health?.watchdog_seconds), memory_mb: limits.memory_bytes ? String(limits.memory_bytes / 1e6) : '', open_files: text(limits.open_files), nice: text(limits.nice), sandbox: spec.sandbox?.level || 'off',
  };
}

/** The body of the request. `base` is the spec that is edited or cloned: whatever the form has no field for stays. */
function requestOf(mode, form, place, base = null) {
  const env = mapping(form.env);
  if (mode === 'template') return { name: form.name.trim(), template: form.template, ...(env ? { env } : {}) };
  const secrets = mapping(form.secrets);
  if (mode === 'satellite') {
    const options = Object.fromEntries(form.options.filter(([key]) => key).map(([key, value]) => [key, ['true', 'false'].includes(value) ? value === 'true' : number(value)]));
    return { name: form.name.trim(), satellite: { kind: form.kind, ...options, ...(form.to.trim() ? { to: form.to.trim() } : {}) }, ...(secrets ? { secrets } : {}), ...(env ? { env } : {}) };
  }
  const megabytes = number(form.memory_mb);
  const own = some({
    cwd: (form.cwd ?? place).trim(), env, labels: mapping(form.labels),
    secrets: secrets && Object.fromEntries(Object.entries(secrets).map(([key, value]) => [key, { ...base?.secrets?.[key], value: value === '' && base ? null : value }])),
    restart: some({ policy: form.policy === 'on-failure' && !base ? '' : form.policy, max_crashes: number(form.max_crashes), window_seconds: number(form.window_seconds), backoff_seconds: number(form.backoff_seconds) }),
    stop: some({ signal: form.signal.trim(), grace_seconds: number(form.grace_seconds) }),
    limits: some({ memory_bytes: typeof megabytes === 'number' ? Math.round(megabytes * 1e6) : megabytes, open_files: number(form.open_files), nice: number(form.nice) }),
    health: healthOf(form), sandbox: sandboxOf(form.sandbox, base),
  });
  const spec = { command: split(form.command).words, lifetime: form.lifetime, ...(form.port ? { port: true } : {}), ...own };
  return { name: form.name.trim(), spec: base ? over(base, spec) : spec };
}

function over(base, spec) {
  const kept = { ...base, port: false, cwd: null, env: {}, labels: {}, secrets: {}, ...spec };
  for (const part of ['restart', 'stop', 'limits']) kept[part] = { ...base[part], ...spec[part] };
  for (const key of ['memory_bytes', 'open_files', 'nice']) if (spec.limits?.[key] === undefined) kept.limits[key] = null;
  kept.health = spec.health ? { ...base.health, http: null, tcp: null, command: null, ...spec.health } : null;
  return kept;
}

/** Paths and ports that are listed stay while the level does; another level begins without them. */
function sandboxOf(level, base) {
  if (base?.sandbox?.level === level) return base.sandbox;
  return level === 'off' && !base ? undefined : { level };
}

function healthOf(form) {
  if (form.health === 'none') return undefined;
  const watchdog = number(form.watchdog_seconds);
  const check = form.health === 'notify' ? { notify: true } : { [form.health]: form.health === 'command' ? split(form.health_target).words : form.health_target.trim() };
  return { ...check, ...(watchdog === '' ? {} : { watchdog_seconds: watchdog }) };
}
