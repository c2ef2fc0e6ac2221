"use strict";
// The files beside this one are put together into the page's one script; page.js, the last, starts it.

// thumbnails: data: addresses. runs: the images of each run by column, or null; see contents.py.
const report = JSON.parse(document.getElementById("report-data").textContent);
const UNKNOWN = -1;

const byId = (id) => document.getElementById(id);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// Children that are strings become text: nothing that comes from data is ever read as markup.
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const named = (text) => make("bdi", {}, text);

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
