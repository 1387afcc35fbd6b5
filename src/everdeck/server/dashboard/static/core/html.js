// The one place that knows which rendering library we use: every other module imports from here.
import { Component, h, render, Fragment } from '../vendor/preact.mjs';
import { useCallback, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from '../vendor/hooks.mjs';
import htm from '../vendor/htm.mjs';

export const html = htm.bind(h);
export { Component, render, Fragment, useCallback, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState };

/** Class names from what holds: classes('row', selected && 'is-selected'). */
export const classes = (...names) => names.filter(Boolean).join(' ');
