/* A definition opens when the pointer or the keyboard rests on the link of a term. */
(function () {
  "use strict";
  if (location.protocol === "file:" && typeof DOCUMENTATION_OPTIONS !== "undefined") {
    // A page that was opened from a folder may not read other pages. So results are titles only.
    DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false; // of Sphinx, no property of the window
  }

  // For readers who listen or have no mouse: captions get a level, both sides of the page a name,
  // and the keyboard reaches what can be moved sideways.
  function speakOfItself() {
    document.querySelectorAll('p.caption[role="heading"]').forEach((caption) => {
      caption.setAttribute("aria-level", "2");
    });
    const sides = { ".sidebar-drawer": "Pages", ".toc-drawer": "On this page" };
    for (const [side, name] of Object.entries(sides)) {
      const found = document.querySelector(side);
      if (found) found.setAttribute("aria-label", name);
    }
    document.querySelectorAll("article pre, article .table-wrapper").forEach((box) => {
      box.setAttribute("tabindex", "0");
    });
    document.querySelectorAll("article table").forEach((table) => {
      // Where the first column has no heading, it has the names of the rows.
      const corner = table.querySelector("thead th");
      if (!corner || corner.textContent.trim()) return;
      corner.outerHTML = "<td></td>";
      table.querySelectorAll("tbody tr > td:first-child").forEach((cell) => {
        const name = document.createElement("th");
        name.scope = "row";
        name.className = cell.className;
        name.append(...cell.childNodes);
        cell.replaceWith(name);
      });
    });
    document.querySelectorAll("article th").forEach((cell) => {
      if (!cell.textContent.trim()) cell.outerHTML = "<td></td>"; // a heading that says nothing
    });
  }

  // What the glossary says of the term that a link leads to, in the language of this page.
  function definitionOf(link) {
    const found = /GLOSSARY\.html#(.+)$/.exec(link.getAttribute("href") || "");
    return found ? (window.GLOSSARY || {})[decodeURIComponent(found[1])] : undefined;
  }

  // A Korean page says its language and searches in Korean pages, and the search page leads to the other language.
  function speakItsLanguage() {
    const asked = new URLSearchParams(location.search);
    const root = new URL(document.documentElement.dataset.content_root || "./", location.href);
    const page = location.href.slice(root.href.length);
    const isKoreanPage = /^(ko\/|README\.ko\.)/.test(page);
    if (isKoreanPage) document.querySelector("article").lang = "ko"; // Sphinx knows one language
    const isKorean = isKoreanPage || asked.get("lang") === "ko";
    for (const form of isKorean ? document.querySelectorAll("form[role=search]") : []) {
      form.insertAdjacentHTML("beforeend", '<input type="hidden" name="lang" value="ko">');
    }
    const results = document.getElementById("search-results");
    if (!results) return;
    asked.set("lang", isKorean ? "en" : "ko");
    const other = document.createElement("a");
    other.href = `?${asked}`;
    other.lang = isKorean ? "en" : "ko";
    other.textContent = isKorean ? "Search the English pages" : "한국어 페이지에서 찾기";
    const line = document.createElement("p");
    line.append(other);
    results.after(line);
  }

  function place(box, link) {
    const at = link.getBoundingClientRect();
    const widest = document.documentElement.clientWidth - box.offsetWidth - 8;
    box.style.left = Math.max(8, Math.min(at.left, widest)) + window.scrollX + "px";
    box.style.top = at.bottom + 6 + window.scrollY + "px";
  }

  document.addEventListener("DOMContentLoaded", function () {
    speakOfItself();
    speakItsLanguage();
    const box = document.createElement("div");
    box.id = "definition";
    box.setAttribute("role", "tooltip");
    box.hidden = true;
    document.body.appendChild(box);

    function show(link) {
      box.textContent = definitionOf(link);
      box.hidden = false;
      place(box, link);
    }
    function hide() {
      box.hidden = true;
    }
    for (const link of document.querySelectorAll("article a[href]")) {
      if (!definitionOf(link)) continue;
      link.classList.add("term");
      link.setAttribute("aria-describedby", "definition");
      link.addEventListener("mouseenter", () => show(link));
      link.addEventListener("focus", () => show(link));
      link.addEventListener("mouseleave", hide);
      link.addEventListener("blur", hide);
    }
    document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  });
})();
