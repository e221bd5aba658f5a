// Keeps an open page up to date: takes the views that the service sends, and keeps relative times right.
"use strict";

const RETRY_MS = 2000;
const UNITS = [
  [60, 1, "second"], [3600, 60, "minute"], [2 * 86400, 3600, "hour"], [60 * 86400, 86400, "day"],
  [2 * 365 * 86400, 30 * 86400, "month"], [Infinity, 365 * 86400, "year"],
];

function relative(seconds) {
  const distance = Math.abs(seconds);
  if (distance < 1) return "now";
  const [, length, unit] = UNITS.find(([below]) => distance < below);
  const number = Math.floor(distance / length);
  const words = `${number} ${unit}${number === 1 ? "" : "s"}`;
  return seconds > 0 ? `in ${words}` : `${words} ago`;
}

function updateTimes() {
  for (const time of document.querySelectorAll("time[datetime]")) {
    const text = relative((Date.parse(time.dateTime) - Date.now()) / 1000);
    if (time.textContent !== text) time.textContent = text;
  }
}

const live = document.querySelector("#live[data-live]");
const connection = document.getElementById("connection");
const pause = document.getElementById("pause");
let source = null;
let isPaused = false;
let waiting = null;

function say(state, text) {
  if (connection.dataset.state === state) return;
  connection.dataset.state = state;
  connection.textContent = text;
}

// What is being read or used stays: a selection delays the update, and the focus and the scroll position are kept.
function show(html) {
  const selection = getSelection();
  if (!selection.isCollapsed && live.contains(selection.anchorNode)) {
    waiting = html;
    return;
  }
  waiting = null;
  const active = document.activeElement;
  const focused = live.contains(active) ? [...live.querySelectorAll("a, button, [tabindex]")].indexOf(active) : -1;
  const address = focused < 0 ? null : active.getAttribute("href");
  const scrolled = [...live.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  live.innerHTML = html;
  live.querySelectorAll(".scroll").forEach((box, at) => { box.scrollLeft = scrolled[at] || 0; });
  if (focused >= 0) {
    const all = [...live.querySelectorAll("a, button, [tabindex]")];
    const same = address === null ? null : all.find((one) => one.getAttribute("href") === address);
    (same || all[focused] || document.getElementById("main")).focus({ preventScroll: true });
  }
  updateTimes();
}

function connect() {
  source = new EventSource(`/page/events?view=${encodeURIComponent(location.pathname + location.search)}`);
  source.addEventListener("open", () => say("live", "Live"));
  source.addEventListener("view", (event) => show(JSON.parse(event.data)));
  source.addEventListener("ended", () => {
    disconnect();
    pause.hidden = true;
    say("ended", "");
    const link = document.createElement("a");
    link.href = `/page/login?next=${encodeURIComponent(location.pathname + location.search)}`;
    link.textContent = "Session ended: log in";
    connection.replaceChildren(link);
  });
  source.addEventListener("error", () => {
    say("lost", "Lost connection, trying again");
    if (source && source.readyState === EventSource.CLOSED) {
      disconnect();
      setTimeout(() => { if (!isPaused && !source) connect(); }, RETRY_MS);
    }
  });
}

function disconnect() {
  if (source) source.close();
  source = null;
}

if (live && connection && pause) {
  pause.hidden = false;
  pause.addEventListener("click", () => {
    isPaused = !isPaused;
    pause.setAttribute("aria-pressed", String(isPaused));
    pause.textContent = isPaused ? "Resume" : "Pause";
    if (isPaused) {
      disconnect();
      say("paused", "Paused");
    } else {
      connect();
    }
  });
  document.addEventListener("selectionchange", () => { if (waiting !== null) show(waiting); });
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", () => { if (!isPaused && !source) connect(); });
}
setInterval(updateTimes, 1000);
