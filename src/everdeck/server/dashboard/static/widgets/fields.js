// Form fields whose errors stand next to them and are read out with them.
import { html, classes } from '../core/html.js';
import { Icon } from './icons.js';

export function Field({ label, name, value, onInput, error, hint, mono, type = 'text', ...rest }) {
  const id = `f-${name}`;
  const about = [error && `${id}-error`, hint && `${id}-hint`].filter(Boolean).join(' ');
  return html`
    <div class=${classes('field', error && 'is-wrong')}>
      <label for=${id}>${label}</label>
      <input id=${id} name=${name} type=${type} class=${mono ? 'mono' : ''} value=${value} onInput=${(e) => onInput(e.target.value)}
        aria-invalid=${error ? 'true' : undefined} aria-describedby=${about || undefined} ...${rest} />
      ${error && html`<p class="field-error" id="${id}-error" role="alert">${error}</p>`}
      ${hint && html`<p class="field-hint" id="${id}-hint">${hint}</p>`}
    </div>`;
}

/** Rows of key and value. */
export function Pairs({ title, name, pairs, onPairs, error, hint, keyLabel, secret }) {
  const change = (i, side, text) => onPairs(pairs.map((pair, at) => (at === i ? (side ? [pair[0], text] : [text, pair[1]]) : pair)));
  return html`
    <div class=${classes('pairs', error && 'is-wrong')} role="group" aria-label=${title}>
      <p class="pairs-title">${title}</p>
      ${pairs.map(([key, value], i) => html`
        <div class="pair" key=${i}>
          <input class="mono" name="${name}.key" aria-label="${keyLabel} ${i + 1} name" placeholder="NAME" value=${key} spellcheck=${false} autocomplete="off" aria-invalid=${error ? 'true' : undefined} onInput=${(e) => change(i, 0, e.target.value)} />
          <span aria-hidden="true">=</span>
          <input class="mono" name="${name}.value" aria-label="${keyLabel} ${i + 1} value" placeholder="value" type=${secret ? 'password' : 'text'} value=${value} spellcheck=${false} autocomplete="off" onInput=${(e) => change(i, 1, e.target.value)} />
          <button type="button" class="icon-button" aria-label="Remove ${keyLabel.toLowerCase()} ${i + 1}" onClick=${() => onPairs(pairs.filter((_, at) => at !== i))}><${Icon} name="close" size=${14} /></button>
        </div>`)}
      ${error && html`<p class="field-error" role="alert">${error}</p>`}
      <button type="button" class="button is-small is-quiet" onClick=${() => onPairs([...pairs, ['', '']])}><${Icon} name="plus" size=${12} />Add ${keyLabel.toLowerCase()}</button>
      ${hint && html`<p class="field-hint">${hint}</p>`}
    </div>`;
}
