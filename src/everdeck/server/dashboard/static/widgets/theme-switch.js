// Light, dark, or as the system says. Remembered on this machine; theme/early.js applies it before the first paint.
import { html, useState } from '../core/html.js';
import { Icon } from './icons.js';

const NEXT = { auto: 'light', light: 'dark', dark: 'auto' };
const ICONS = { auto: 'auto', light: 'sun', dark: 'moon' };

export function ThemeSwitch() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme || 'auto');
  const turn = () => {
    const next = NEXT[theme];
    if (next === 'auto') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem('everdeck-theme', next);
    } catch {
      // A browser that refuses storage still switches, until it is reloaded.
    }
    setTheme(next);
    dispatchEvent(new Event('everdeck-theme'));
  };
  return html`<button class="icon-button" onClick=${turn} title="Theme: ${theme}" aria-label="Theme: ${theme}. Switch to ${NEXT[theme]}"><${Icon} name=${ICONS[theme]} /></button>`;
}
