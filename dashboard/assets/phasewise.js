/* The address is the state of a page. Everything that changes it goes through `change` and `go`; the pages only read it. */
(function () {
  "use strict";

  var HEALTH_EVERY_MS = 5000;
  var AMBER_S = 30;
  var RED_S = 120;
  var SLOW_MS = 3000;
  var UNITS_MS = { s: 1e3, m: 6e4, h: 3.6e6, d: 8.64e7, w: 6.048e8 };

  var lastView = "";
  var lastWatermark = null;
  var lastOk = 0;
  var lastTick = 0;
  var lost = false;
  var order = 0;
  /* Names this document to the server, which can then call off what it no longer waits for. */
  var tab = Array.from(window.crypto.getRandomValues(new Uint8Array(12)), function (byte) {
    return byte.toString(16).padStart(2, "0");
  }).join("");

  function noUpdate() {
    return window.dash_clientside.no_update;
  }

  function props(id, values) {
    window.dash_clientside.set_props(id, values);
  }

  function view() {
    return { path: window.location.pathname, search: window.location.search.replace(/^\?/, "") };
  }

  /* A view as the pages get it: with who asks, and after what. */
  function asked(v) {
    order += 1;
    return { path: v.path, search: v.search, tab: tab, order: order };
  }

  function canonical(v) {
    return v.path + "?" + v.search;
  }

  /* Tells the pages about the address, once for each address. */
  function publish() {
    var now = view();
    if (canonical(now) === lastView) {
      return;
    }
    lastView = canonical(now);
    props("query", { data: asked(now) });
    var names = { "": "Triage", triage: "Triage", requests: "Requests", slices: "Slices", trace: "Request" };
    document.title = (names[now.path.split("/")[1] || ""] || "Not found") + " · Phasewise";
  }

  /* changes: key -> text, list of texts, or null to drop the key. Refinements replace the history entry, so that Back leaves. */
  function change(changes, push) {
    var search = new URLSearchParams(window.location.search);
    Object.keys(changes).forEach(function (key) {
      var value = changes[key];
      search.delete(key);
      (value === null ? [] : [].concat(value)).forEach(function (one) {
        search.append(key, one);
      });
    });
    move(window.location.pathname + (search.toString() ? "?" + readable(search) : ""), push);
  }

  /* Colons and commas stay readable: people read and edit these addresses. */
  function readable(search) {
    return search.toString().replace(/%3A/gi, ":").replace(/%2C/gi, ",").replace(/%2F/gi, "/");
  }

  function move(address, push) {
    if (push) {
      window.history.pushState(null, "", address);
    } else {
      window.history.replaceState(null, "", address);
    }
    publish();
  }

  function go(address) {
    var target = new URL(address, window.location.href);
    if (target.origin !== window.location.origin) {
      return;
    }
    var samePage = target.pathname === window.location.pathname;
    move(target.pathname + target.search, !samePage);
    if (!samePage) {
      window.scrollTo(0, 0);
    }
  }

  /* ---- time ---- */

  function instant(text, now) {
    var match = /^now(?:-(\d+)([smhdw]))?$/.exec(text.trim());
    if (match) {
      return now - (match[1] ? Number(match[1]) * UNITS_MS[match[2]] : 0);
    }
    if (/^\d+$/.test(text)) {
      return text.length <= 11 ? Number(text) * 1e3 : text.length <= 14 ? Number(text) : Number(text) / 1e6;
    }
    var zoned = /[zZ]|[+-]\d\d:?\d\d$/.test(text) ? text : text.trim().replace(" ", "T") + "Z";
    return Date.parse(zoned);
  }

  function range() {
    var search = new URLSearchParams(window.location.search);
    var now = Date.now();
    return {
      from: instant(search.get("from") || "now-15m", now),
      to: instant(search.get("to") || "now", now),
    };
  }

  function stamp(ms) {
    return new Date(Math.round(ms)).toISOString().replace(/\.000Z$/, "Z");
  }

  function setRange(from, to, push) {
    if (isFinite(from) && isFinite(to) && to > from) {
      change({ from: stamp(from), to: stamp(to) }, push);
    }
  }

  function shift(direction) {
    var r = range();
    setRange(r.from + direction * (r.to - r.from), r.to + direction * (r.to - r.from), false);
  }

  function zoomOut(factor) {
    var r = range();
    var middle = (r.from + r.to) / 2;
    var half = ((r.to - r.from) / 2) * factor;
    setRange(Math.max(0, middle - half), Math.min(middle + half, Date.now()), false);
  }

  function applyRange() {
    var from = document.getElementById("range-from").value.trim();
    var to = document.getElementById("range-to").value.trim();
    var both = /^(.+?)\s*\.\.\s*(.+)$/.exec(from);
    if (both) {
      from = both[1];
      to = /^\d\d:\d\d/.test(both[2]) ? from.slice(0, from.length - both[2].length) + both[2] : both[2];
    }
    change({ from: from || null, to: to || null }, true);
    closeAll();
  }

  /* ---- filters ---- */

  var OPERATORS = { "=": "eq", "!=": "ne", ">=": "ge", "<=": "le", ">": "gt", "<": "lt", "^=": "prefix" };

  function addFilter(text) {
    var cleaned = text.trim();
    if (!cleaned) {
      return false;
    }
    var match = /^([A-Za-z_.]+)\s*(!=|>=|<=|\^=|=|>|<)\s*(.+)$/.exec(cleaned);
    var filter = match ? match[1] + ":" + OPERATORS[match[2]] + ":" + match[3].trim() : cleaned;
    var kept = new URLSearchParams(window.location.search).getAll("f");
    if (kept.indexOf(filter) < 0) {
      change({ f: kept.concat([filter]) }, false);
    }
    return true;
  }

  /* ---- what the shell shows about the server ---- */

  function ageText(s) {
    if (s < 90) {
      return Math.round(Math.max(0, s)) + " s";
    }
    if (s < 5400) {
      return Math.round(s / 60) + " min";
    }
    return s < 129600 ? Math.round(s / 3600) + " h" : Math.round(s / 86400) + " d";
  }

  function lamp(tone, text) {
    var element = document.getElementById("lamp");
    if (!element) {
      return;
    }
    element.dataset.tone = tone;
    element.querySelector(".lamp-text").textContent = text;
  }

  function banner(text, tone, id) {
    var element = document.getElementById(id || "banner");
    if (element && element.textContent !== text) {
      element.textContent = text;
      element.dataset.tone = tone;
    }
  }

  function refreshMs() {
    var search = new URLSearchParams(window.location.search);
    if (!(search.get("to") || "now").startsWith("now")) {
      return 0;
    }
    var match = /^(\d+)(s|m|h)?$/.exec(search.get("refresh") || "10s");
    return match ? Math.max(5000, Number(match[1]) * UNITS_MS[match[2] || "s"]) || 0 : 0;
  }

  function tick(force) {
    var now = Date.now();
    var every = refreshMs();
    /* What takes longer than the time between two refreshes must not begin again and again. */
    var working = document.querySelector(".region.is-slow");
    if (!force && (!every || now - lastTick < every - 250 || document.hidden || working)) {
      return;
    }
    lastTick = now;
    props("tick", { data: { watermark: lastWatermark, at: now } });
  }

  function onHealth(told) {
    var wasLost = lost;
    lost = false;
    lastOk = Date.now();
    document.body.classList.remove("is-stale");
    banner((told.notices || []).join(" "), "red", "notice");
    if (told.status !== "ok") {
      lamp("red", "store not readable");
      banner("The store cannot be read. What is shown is from before; it comes back by itself.", "red");
      if (lastWatermark !== "degraded") {
        lastWatermark = "degraded";
        tick(true);
      }
      return;
    }
    banner("", "");
    var age = told.age_s;
    if (age === null || age === undefined) {
      lamp("grey", "no data yet");
    } else if (age <= AMBER_S) {
      lamp("green", "live, data " + ageText(age) + " old");
    } else {
      lamp(age <= RED_S ? "amber" : "grey", "no new data for " + ageText(age));
    }
    var moved = told.watermark !== lastWatermark;
    var first = lastWatermark === null;
    var recovered = wasLost || lastWatermark === "degraded";
    lastWatermark = told.watermark;
    if (recovered && !first) {
      tick(true);
    } else if (moved && !first) {
      tick(false);
    }
  }

  function onLost() {
    lost = true;
    lamp("red", "server not reachable");
    var since = lastOk ? " Figures are from " + new Date(lastOk).toISOString().slice(11, 19) + " UTC." : "";
    banner("The server does not answer." + since + " This page tries again by itself.", "red");
    document.body.classList.add("is-stale");
  }

  function pulse() {
    var abort = new AbortController();
    var timer = window.setTimeout(function () {
      abort.abort();
    }, 4000);
    window
      .fetch("/api/v1/pulse", { signal: abort.signal, cache: "no-store" })
      .then(function (answer) {
        if (answer.status === 401) {
          /* The session is over, or its key is no longer in force. */
          window.location.assign("/login?next=" + encodeURIComponent(location.pathname + location.search));
        }
        return answer.json();
      })
      .then(onHealth)
      .catch(onLost)
      .finally(function () {
        window.clearTimeout(timer);
        window.setTimeout(pulse, document.hidden ? HEALTH_EVERY_MS * 3 : HEALTH_EVERY_MS);
      });
  }

  /* ---- parts of a page that take long ---- */

  var busySince = new WeakMap();

  function isBusy(region) {
    return region.dataset.reading || region.querySelector(":scope > [data-dash-is-loading=true]");
  }

  function watchRegions() {
    var now = Date.now();
    document.querySelectorAll(".region").forEach(function (region) {
      var busy = isBusy(region);
      if (busy && !busySince.has(region)) {
        busySince.set(region, now);
      } else if (!busy) {
        busySince.delete(region);
      }
      var slow = Boolean(busy) && now - busySince.get(region) >= SLOW_MS;
      if (slow && !region.classList.contains("is-slow")) {
        region.querySelector(".working-text").textContent = "Still working";
        region.querySelector("[data-cancel]").disabled = false;
      }
      region.classList.toggle("is-slow", slow);
    });
    if (document.querySelector(".region.is-slow")) {
      window
        .fetch("/api/v1/work?tab=" + tab, { cache: "no-store" })
        .then(function (answer) {
          return answer.json();
        })
        .then(function (told) {
          document.querySelectorAll(".region.is-slow .working-text").forEach(function (element) {
            var n = told.requests;
            element.textContent = "Still working" + (n === null ? "" : ", " + n.toLocaleString("en-US") + " requests in this window");
          });
        })
        .catch(function () {}); // the lamp tells of a lost server
    }
  }

  function cancel(button) {
    button.disabled = true;
    window
      .fetch("/api/v1/work?tab=" + tab + "&part=" + encodeURIComponent(button.dataset.cancel), {
        method: "DELETE",
        headers: { "Content-Type": "application/json" },
      })
      .catch(function () {
        button.disabled = false;
      });
  }

  window.setInterval(watchRegions, 500);

  /* ---- small things ---- */

  function toast(text) {
    var element = document.getElementById("toast");
    element.textContent = text;
    element.classList.add("shown");
    window.setTimeout(function () {
      element.classList.remove("shown");
    }, 1800);
  }

  function copy(text, told) {
    if (!navigator.clipboard) {
      toast("Copying needs a secure address (https or localhost)");
      return;
    }
    navigator.clipboard.writeText(text).then(
      function () {
        toast(told || "Copied");
      },
      function () {
        toast("The browser did not allow copying");
      }
    );
  }

  /* The API refuses parameters that it does not read; the address of a page may hold others. */
  var API_KEYS = ["from", "to", "f", "filter", "slo", "metric", "sel", "sort", "rows", "cols", "cell", "v"];
  function forApi(search) {
    var kept = new URLSearchParams();
    search.forEach(function (value, name) {
      if (API_KEYS.indexOf(name) >= 0 || name.indexOf("var-") === 0) {
        kept.append(name, value);
      }
    });
    return kept;
  }

  function share(kind) {
    var search = new URLSearchParams(window.location.search);
    var r = range();
    if (kind !== "link-live" && isFinite(r.from) && isFinite(r.to)) {
      search.set("from", stamp(r.from));
      search.set("to", stamp(r.to));
    }
    var query = readable(search);
    if (kind === "curl") {
      copy("curl '" + window.location.origin + "/api/v1/verdict?" + readable(forApi(search)).replace(/'/g, "%27") + "'", "curl command copied");
    } else if (kind === "cli") {
      var parts = ["phasewise analyze"];
      ["from", "to"].forEach(function (end) {
        if (search.get(end)) {
          parts.push("--" + end + " " + quoted(search.get(end)));
        }
      });
      search.getAll("f").concat(search.getAll("filter")).forEach(function (f) {
        parts.push("--filter " + quoted(f));
      });
      if (search.get("slo")) {
        parts.push("--slo " + quoted(search.get("slo")));
      }
      copy(parts.join(" "), "Command copied");
    } else {
      copy(window.location.origin + window.location.pathname + "?" + query, "Link copied");
    }
  }

  /* A word of a shell command. */
  function quoted(text) {
    return /^[\w.:,@%+=/-]+$/.test(text) ? text : "'" + text.replace(/'/g, "'\\''") + "'";
  }

  function judge(button) {
    var r = range();
    window
      .fetch("/api/v1/outcomes", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ right: button.dataset.judge === "yes", cause: button.dataset.cause, time: isFinite(r.to) ? stamp(r.to) : "now" }),
      })
      .then(function (answer) {
        toast(answer.ok ? "Thank you, noted" : "This could not be stored");
      })
      .catch(function () {
        toast("This could not be stored");
      });
  }

  function closeAll(except) {
    document.querySelectorAll("details.pop[open]").forEach(function (element) {
      if (element !== except) {
        element.removeAttribute("open");
      }
    });
    document.querySelectorAll(".dialog.open").forEach(function (element) {
      element.classList.remove("open");
    });
  }

  function toggleTheme() {
    var root = document.documentElement;
    root.dataset.theme = root.dataset.theme === "light" ? "dark" : "light";
    try {
      window.localStorage.setItem("phasewise.theme", root.dataset.theme);
    } catch (error) {
      toast("The theme holds until this page is closed"); // storage can be switched off
    }
  }

  /* ---- events, delegated: the pages come and go ---- */

  document.addEventListener("click", function (event) {
    var target = event.target instanceof Element ? event.target : null;
    if (!target) {
      return;
    }
    var anchor = target.closest("a[data-nav]");
    if (anchor && event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey) {
      event.preventDefault();
      go(anchor.getAttribute("href") + (anchor.dataset.nav === "keep" ? window.location.search : ""));
      return;
    }
    var button = target.closest("button");
    if (button) {
      var data = button.dataset;
      if (data.change) {
        change(JSON.parse(data.change), false);
        closeAll();
      } else if (data.copy) {
        copy(data.copy);
      } else if (data.share) {
        share(data.share);
        closeAll();
      } else if (data.shift) {
        shift(Number(data.shift));
      } else if (data.zoom) {
        zoomOut(Number(data.zoom));
      } else if (data.applyRange) {
        applyRange();
      } else if (data.applySlo) {
        change({ slo: document.getElementById("slo-input").value.trim() || null }, false);
        closeAll();
      } else if (data.themeToggle) {
        toggleTheme();
      } else if (data.retry) {
        tick(true);
      } else if (data.cancel) {
        cancel(button);
      } else if (data.judge) {
        judge(button);
      } else if (data.open) {
        document.getElementById(data.open).classList.toggle("open");
        return;
      }
    }
    var pop = target.closest("details.pop");
    closeAll(pop);
  });

  document.addEventListener("change", function (event) {
    if (event.target instanceof HTMLSelectElement && event.target.dataset.select) {
      var changes = {};
      changes[event.target.dataset.select] = event.target.value;
      if (event.target.dataset.select === "metric") {
        changes.sel = null;
      }
      change(changes, false);
    }
  });

  /* Tables behind charts are made when they are opened, and again when their figures change. */
  function drawTable(place) {
    if (!place.closest("details[open]")) {
      return;
    }
    var told = JSON.parse(place.dataset.table);
    var table = document.createElement("table");
    table.className = "plain-table";
    function row(kind, cells, into) {
      var line = into.insertRow();
      cells.forEach(function (text, i) {
        var cell = document.createElement(kind);
        cell.textContent = text;
        cell.className = i >= told.numbers_from ? "num" : "";
        line.appendChild(cell);
      });
    }
    row("th", told.columns, table.createTHead());
    var body = table.createTBody();
    told.rows.forEach(function (cells) {
      row("td", cells, body);
    });
    place.replaceChildren(table);
  }

  document.addEventListener(
    "toggle",
    function (event) {
      if (event.target instanceof Element) {
        event.target.querySelectorAll("[data-table]").forEach(drawTable);
      }
    },
    true
  );

  new MutationObserver(function (changes) {
    changes.forEach(function (one) {
      drawTable(one.target);
    });
  }).observe(document, { subtree: true, attributes: true, attributeFilter: ["data-table"] });

  var pending = "";
  var KEYS = {
    "?": function () {
      document.getElementById("keys").classList.toggle("open");
    },
    "/": function () {
      document.getElementById("filter-input").focus();
    },
    "g t": function () {
      page("triage");
    },
    "g r": function () {
      page("requests");
    },
    "g s": function () {
      page("slices");
    },
    "t z": function () {
      zoomOut(2);
    },
    "t ArrowLeft": function () {
      shift(-1);
    },
    "t ArrowRight": function () {
      shift(1);
    },
    "t a": function () {
      var r = range();
      setRange(r.from, r.to, false);
    },
    "d r": function () {
      tick(true);
    },
    "c s": function () {
      share("link-frozen");
    },
  };

  function page(name) {
    var found = document.querySelector(".nav-links a[href^='/" + name + "']");
    go(found ? found.getAttribute("href") : "/" + name);
  }

  document.addEventListener("keydown", function (event) {
    var target = event.target;
    var typing = target instanceof HTMLElement && /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName);
    if (event.key === "Escape") {
      closeAll();
      if (typing) {
        target.blur();
      }
      return;
    }
    if (typing) {
      if (event.key === "Enter" && target.id === "filter-input" && addFilter(target.value)) {
        props("filter-input", { value: "" });
      } else if (event.key === "Enter" && (target.id === "range-from" || target.id === "range-to")) {
        applyRange();
      } else if (event.key === "Enter" && target.id === "slo-input") {
        change({ slo: target.value.trim() || null }, false);
        closeAll();
      }
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey) {
      return;
    }
    var combined = pending ? pending + " " + event.key : event.key;
    pending = "";
    if (KEYS[combined]) {
      event.preventDefault();
      KEYS[combined]();
    } else if (/^[gtdc]$/.test(event.key)) {
      pending = event.key;
      window.setTimeout(function () {
        pending = "";
      }, 1200);
    }
  });

  window.addEventListener("popstate", publish);

  /* ---- functions that Dash calls ---- */

  function rowRequest(query, request, start, cursor) {
    var search = forApi(new URLSearchParams(query.search));
    var sorted = (request.sortModel || [])[0];
    if (sorted) {
      search.set("sort", GRID_SORT[sorted.colId] + ":" + sorted.sort);
    }
    search.set("display", "true");
    search.set("limit", String(request.endRow - request.startRow));
    if (cursor) {
      search.set("cursor", cursor);
    }
    var mine = { "Phasewise-Work": [tab, "requests-table", query.order].join(" ") };
    reading(1);
    return window
      .fetch("/api/v1/requests?" + search.toString(), { cache: "no-store", headers: mine })
      .then(function (answer) {
        return answer.json().then(function (told) {
          if (!answer.ok) {
            var error = new Error("the list answered " + answer.status);
            error.stopped = told.field === "from" || answer.status === 400 ? told : null;
            error.wrong = answer.status === 400;
            throw error;
          }
          return told;
        });
      })
      .finally(function () {
        reading(-1);
      });
  }

  var readings = 0;

  function reading(more) {
    readings += more;
    var region = document.getElementById("requests-table");
    if (region) {
      region.parentElement.dataset.reading = readings > 0 ? "1" : "";
    }
  }

  /* Tells the page why the list was given up, or that it was not. */
  var listStopped = false;
  function tellStopped(told, kept, wrong) {
    if (told || listStopped) {
      props("requests-stopped", { data: told ? { error: told.error, remedy: told.remedy, kept: kept, wrong: wrong } : null });
    }
    listStopped = Boolean(told);
  }

  var GRID_SORT = {
    finished: "finished",
    e2e: "e2e",
    ttft: "ttft",
    tpot: "tpot",
    queue: "queue",
    input_tokens: "input_tokens",
    output_tokens: "output_tokens",
    cached_tokens: "cached_tokens",
  };
  /* Where each block of the grid starts, for the list now shown. A block that was jumped over is read on the way. */
  var blocks = { key: "", cursors: {}, total: null, kept: {} };

  function rows(request, query) {
    if (!request || !query) {
      return noUpdate();
    }
    var key = query.search + "|" + JSON.stringify(request.sortModel || []);
    if (blocks.key !== key || request.startRow === 0) {
      blocks = { key: key, cursors: { 0: "" }, total: null, kept: blocks.key === key ? blocks.kept : {} };
    }
    var mine = blocks;
    var size = request.endRow - request.startRow;

    function block(start) {
      if (start > 0 && mine.cursors[start] === undefined) {
        return block(start - size).then(function () {
          return mine.cursors[start] ? fetchBlock(start) : { requests: [] };
        });
      }
      return start > 0 && !mine.cursors[start] ? Promise.resolve({ requests: [] }) : fetchBlock(start);
    }

    function fetchBlock(start) {
      return rowRequest(query, request, start, mine.cursors[start]).then(function (told) {
        mine.cursors[start + size] = told.next;
        if (told.total !== null) {
          mine.total = told.total;
          var label = document.getElementById("requests-total");
          if (label) {
            label.textContent = told.total.toLocaleString("en-US") + " in this window";
          }
        }
        var slowest = told.requests.reduce(function (most, row) {
          return Math.max(most, row.e2e_s || 0);
        }, 0);
        scale = start === 0 ? slowest : Math.max(scale, slowest);
        return told;
      });
    }

    return block(request.startRow)
      .then(function (told) {
        tellStopped(null);
        mine.kept[request.startRow] = { rowData: told.requests, rowCount: mine.total === null ? undefined : mine.total };
        return mine.kept[request.startRow];
      })
      .catch(function (error) {
        var kept = mine.kept[request.startRow];
        if (mine === blocks) {
          tellStopped(error.stopped, Boolean(kept), Boolean(error.wrong));
        }
        return kept || { rowData: [], rowCount: 0 };
      });
  }

  /* Seconds that fill the width of a phase bar: the slowest request seen in this list. */
  var scale = 0;

  function grid() {
    try {
      return window.dash_ag_grid.getApi("requests-grid");
    } catch (error) {
      return null; // not on this page
    }
  }

  var gridKey = "";
  function reload(query) {
    var api = grid();
    if (api && query) {
      if (gridKey && gridKey !== query.search) {
        api.purgeInfiniteCache();
      } else if (gridKey) {
        api.refreshInfiniteCache();
      }
    }
    gridKey = query ? query.search : "";
    return noUpdate();
  }

  function zoomed(changes) {
    (changes || []).forEach(function (one) {
      var from = one && one["xaxis.range[0]"];
      var to = one && one["xaxis.range[1]"];
      if (from !== undefined && to !== undefined) {
        setRange(plotTime(from), plotTime(to), true);
      }
    });
    return noUpdate();
  }

  /* Plotly tells a moment as text without a zone, in the zone of the axis, which is UTC. */
  function plotTime(value) {
    return typeof value === "number" ? value : Date.parse(value.replace(" ", "T") + "Z");
  }

  function boxed(selected) {
    var box = selected && selected.range;
    if (!box || !box.x || !box.y) {
      return noUpdate();
    }
    var low = Math.pow(10, Math.min(box.y[0], box.y[1]));
    var high = Math.pow(10, Math.max(box.y[0], box.y[1]));
    var times = box.x.map(plotTime).map(Math.round);
    change({ sel: [times[0], times[1], low.toPrecision(4), high.toPrecision(4)].join(",") }, false);
    return noUpdate();
  }

  function openRow(cell) {
    if (cell && cell.rowId !== undefined) {
      var api = grid();
      var node = api && api.getRowNode(cell.rowId);
      if (node && node.data) {
        openRequest(node.data.request_key);
      }
    }
    return noUpdate();
  }

  function openRequest(key) {
    go("/trace/" + encodeURIComponent(key) + window.location.search);
  }

  /* ---- cells of the request table; text only ---- */

  function element(kind, properties) {
    var args = [kind, properties].concat(Array.prototype.slice.call(arguments, 2));
    return window.React.createElement.apply(null, args);
  }

  var COLOURS = {
    queue: "#E69F00",
    context: "#4C7BC9",
    prefill: "#56B4E9",
    combined: "#7C93B8",
    first_token: "#A9DCF7",
    decode: "#009E73",
    external: "#CC79A7",
    residual: "#6F7A89",
  };

  /* The table in the colours of the page: AG Grid takes style-sheet variables where it expects colours. */
  window.dashAgGridFunctions = window.dashAgGridFunctions || {};
  window.dashAgGridFunctions.phasewise_theme = function (theme) {
    return theme.withParams({
      backgroundColor: "var(--panel)",
      foregroundColor: "var(--text)",
      headerBackgroundColor: "var(--panel)",
      headerTextColor: "var(--faint)",
      headerFontWeight: 500,
      headerFontSize: 12,
      borderColor: "var(--line)",
      rowHoverColor: "var(--raised)",
      selectedRowBackgroundColor: "var(--raised)",
      oddRowBackgroundColor: "var(--panel)",
      headerColumnBorder: false,
      headerColumnResizeHandleColor: "transparent",
      wrapperBorder: false,
      wrapperBorderRadius: 0,
      columnBorder: false,
      accentColor: "var(--accent)",
      fontFamily: "inherit",
      fontSize: 13,
      cellHorizontalPadding: 10,
      spacing: 5,
    });
  };

  window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {};
  window.dashAgGridComponentFunctions.PhaseBar = function (cell) {
    if (!cell.data) {
      return element("span", { className: "cell-wait" });
    }
    var parts = cell.data.bar.map(function (part) {
      return element("span", {
        key: part.phase,
        className: part.phase === "residual" ? "phase-part hatched" : "phase-part",
        title: part.title + ": " + part.text,
        style: { width: (scale ? (part.seconds / scale) * 100 : 0) + "%", backgroundColor: COLOURS[part.phase] },
      });
    });
    return element("div", { className: "phase-bar in-cell" }, parts);
  };
  window.dashAgGridComponentFunctions.CauseMark = function (cell) {
    if (!cell.data) {
      return null;
    }
    return element(
      "span",
      { className: "cause-cell" },
      element("span", { className: "dot class-" + (cell.data.primary || "none") }),
      element("span", {}, cell.data.cause_text)
    );
  };
  window.dashAgGridComponentFunctions.RequestLink = function (cell) {
    if (!cell.data) {
      return null;
    }
    return element(
      "a",
      { className: "text-link mono", href: "/trace/" + encodeURIComponent(cell.data.request_key), "data-nav": "keep" },
      (cell.data.trace_id || cell.data.request_key).slice(0, 8)
    );
  };

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    phasewise: {
      boot: function () {
        var now = view();
        lastView = canonical(now);
        window.setTimeout(pulse, 0);
        return asked(now);
      },
      path: function (query, known) {
        if (!query) {
          return noUpdate();
        }
        return known && known.path === query.path ? noUpdate() : { path: query.path, search: query.search };
      },
      zoomed: zoomed,
      ranged: function (changes) {
        (changes || []).forEach(function (one) {
          var low = one && one["xaxis.range[0]"];
          var high = one && one["xaxis.range[1]"];
          if (low !== undefined && high !== undefined) {
            var metric = new URLSearchParams(window.location.search).get("metric") || "ttft";
            var kept = new URLSearchParams(window.location.search).getAll("f").filter(function (f) {
              return f.indexOf(metric + ":ge:") !== 0 && f.indexOf(metric + ":lt:") !== 0;
            });
            var ends = [metric + ":ge:" + Math.pow(10, low).toPrecision(3), metric + ":lt:" + Math.pow(10, high).toPrecision(3)];
            change({ f: kept.concat(ends) }, false);
          }
        });
        return noUpdate();
      },
      boxed: boxed,
      rows: rows,
      reload: reload,
      open_row: openRow,
    },
  });
})();
