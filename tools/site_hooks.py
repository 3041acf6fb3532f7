"""MkDocs' hooks of the documentation site: pages that are made at build time, links, equations. See mkdocs.yml."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))  # MkDocs loads a hook by its path, without its neighbours
import site_pages

ROOT = Path(__file__).parents[1]
# Files beside docs/ that pages link to; on the site they are pages too.
OUTSIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "reporting.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs["pymdownx.superfences"] = {
        "custom_fences": [{"name": "math", "class": "math", "format": _math_fence}]
    }
    assert config.nav
    listed = str(config.nav)
    others = [path.name for path in sorted((ROOT / "docs").glob("*.md")) if f"'{path.name}'" not in listed]
    more = {"Guides": others, "Methods": site_pages.methods_nav(), "Reference": site_pages.reference_nav()}
    for entry in config.nav:
        for key in more.keys() & entry.keys():
            entry[key] += more[key]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = site_pages.pages()
    for name, path in OUTSIDE.items():
        pages[path] = (ROOT / name).read_text().replace("](docs/", "](")
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that lead out of docs/ on the forge stay on the site; what is listed from the program is filled in."""
    for name, path in OUTSIDE.items():
        markdown = markdown.replace(f"](../{name}", f"]({path}").replace(f"]({name}", f"]({path}")
    markdown = markdown.replace("](../README.md", "](index.md").replace("](README.md", "](index.md")
    markdown = re.sub(r"\[([^]]+)\]\((?:\.\./)?examples[^)]*\)", r"\1", markdown)
    if "<!-- datasets -->" in markdown:
        markdown = markdown.replace("<!-- datasets -->", site_pages.datasets_table())
    if page.file.src_path in ("choose-a-method.md", "robustness.md", "regions.md"):
        markdown = _with_method_links(markdown)
    if page.file.src_path == "index.md":
        page.meta["hide"] = ["navigation"]
    return markdown


def _with_method_links(markdown: str) -> str:
    """In the first column of a table, the id of a method leads to its page."""

    def link(found: re.Match[str]) -> str:
        name = found[2].removeprefix("+")
        return f"{found[1]}[`{found[2]}`](methods/{name}.md){found[3]}" if name in site_pages.METHODS else found[0]

    return re.sub(r"^(\| )`([^`]+)`( \|)", link, markdown, flags=re.M)


def _math_fence(source: str, language: str, css_class: str, options: Any, md: Any, **_: Any) -> str:
    return site_pages.math(source)
