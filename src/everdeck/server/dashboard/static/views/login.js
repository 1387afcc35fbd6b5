// Shown when the daemon says 401. A login link (/login#token=…) never gets here.
import { html, useEffect, useRef, useState } from '../core/html.js';
import { api } from '../core/api.js';
import { Moon } from './deck.js';

export function LoginView() {
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const field = useRef(null);
  useEffect(() => {
    document.title = 'Log in · Everdeck';
    field.current?.focus();
  }, []);
  const submit = async (e) => {
    e.preventDefault();
    setBusy(true);
    try {
      await api.login(field.current.value.trim());
      location.reload();
    } catch (failure) {
      setProblem(failure.status === 401 ? 'The daemon does not know this token.' : failure.message);
      setBusy(false);
      field.current?.focus();
    }
  };
  return html`
    <main class="login"><form class="panel login-form" onSubmit=${submit}>
      <${Moon} phase="full" />
      <h1>Everdeck</h1>
      <p>This deck is locked. Open the link that <code>everdeck up</code> printed, or paste its token.</p>
      <div class="field"><label for="token">Token</label>
        <input id="token" name="token" type="password" autocomplete="current-password" required ref=${field} aria-invalid=${problem ? 'true' : undefined} aria-describedby=${problem ? 'token-error' : undefined} />
        ${problem && html`<p class="field-error" id="token-error" role="alert">${problem}</p>`}</div>
      <button class="button is-primary" disabled=${busy}>${busy ? 'Logging in…' : 'Log in'}</button>
    </form></main>`;
}
