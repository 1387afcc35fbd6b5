// One question at a time, in a modal dialog that the browser keeps the focus in.
// ask({title, text, confirm, danger, names}) → Promise of true or false.
import { html, useEffect, useRef } from '../core/html.js';
import { cell, useCell } from '../core/cell.js';
import { plural } from '../core/format.js';
import { holdKeys } from '../core/keys.js';

const question = cell(null);

export function ask(asked) {
  question.value?.answer(false);
  holdKeys(true);
  return new Promise((resolve) => {
    question.set({
      ...asked,
      answer(value) {
        question.set(null);
        holdKeys(false);
        resolve(value);
      },
    });
  });
}

export function Confirm() {
  const asked = useCell(question);
  const dialog = useRef(null);
  const yes = useRef(null);
  const no = useRef(null);
  useEffect(() => {
    if (!asked || !dialog.current) return;
    if (!dialog.current.open) dialog.current.showModal();
    (asked.danger ? no : yes).current?.focus(); // where it cannot be undone, Enter alone must not do it
  }, [asked]);
  if (!asked) return null;
  // Closed before it leaves the document: the browser then gives the focus back to where it was.
  const answer = (value) => {
    dialog.current?.close();
    asked.answer(value);
  };
  const many = asked.names?.length > 1;
  return html`
    <dialog class="dialog" ref=${dialog} aria-labelledby="confirm-title" aria-describedby="confirm-text"
      onCancel=${(e) => { e.preventDefault(); answer(false); }}
      onClick=${(e) => e.target === dialog.current && answer(false)}>
      <form method="dialog" class="dialog-body" onSubmit=${(e) => { e.preventDefault(); answer(true); }}>
        <h2 id="confirm-title">${asked.title}</h2>
        <p id="confirm-text">${asked.text}</p>
        ${many && html`<ul class="confirm-names" aria-label="Workers">
          ${asked.names.slice(0, 8).map((name) => html`<li key=${name}>${name}</li>`)}
          ${asked.names.length > 8 && html`<li class="quiet">and ${plural(asked.names.length - 8, 'more', 'more')}</li>`}
        </ul>`}
        <div class="dialog-actions">
          <button type="button" class="button" ref=${no} onClick=${() => answer(false)}>Cancel</button>
          <button type="submit" class=${asked.danger ? 'button is-danger' : 'button is-primary'} ref=${yes}>${asked.confirm}</button>
        </div>
      </form>
    </dialog>`;
}
