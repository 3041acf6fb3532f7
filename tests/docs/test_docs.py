"""What the documentation shows works as shown."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fedstill
from fedstill.core import custom
from support.runs import SMALL, RunSmall, weights

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.S)


@pytest.fixture
def slow_teacher(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(blocks("docs/your-own-method.md", "python")[0])
    return f"{file}:SlowTeacher"


@pytest.fixture
def by_confidence(tmp_path: Path) -> str:
    file = tmp_path / "servers.py"
    file.write_text(blocks("docs/your-own-method.md", "python")[1])
    return f"{file}:ByConfidence"


@pytest.mark.parametrize("example", [0, 1, 2])
def test_the_methods_of_the_page_have_fewer_than_40_lines_of_class(example: int) -> None:
    code = blocks("docs/your-own-method.md", "python")[example]
    body = code[code.index("@dataclass") :]
    assert len([line for line in body.splitlines() if line.strip()]) < 40


def test_the_pages_server_momentum_adds_up_past_updates(tmp_path: Path) -> None:
    (tmp_path / "momentum.py").write_text(blocks("docs/your-own-method.md", "python")[2])
    method, state = custom.load(f"{tmp_path}/momentum.py:Momentum")(beta=0.5), dict[str, float]()
    for before, after, expected in [(1.0, 3.0, 3.0), (3.0, 7.0, 8.0)]:  # velocities 2, then 0.5 * 2 + 4
        server = SimpleNamespace(before=before, model=after, state=state)
        method.improve(server, [])
        assert server.model == expected


PROXY = {"fraction": 0.1, "pool": 0.1, "proxy": "pool", "server_steps": 5, "rounds": 1}


@pytest.mark.slow
def test_the_server_side_of_the_page_weighs_by_confidence(run_small: RunSmall, by_confidence: str) -> None:
    """At sharpness 0 all clients count alike; far above, the surest alone, whatever its logits are added to."""
    alike, sharp = (run_small(by_confidence, **PROXY, hyper={"sharpness": s}) for s in (0.0, 1e6))
    source = by_confidence.rpartition(":")[0]
    text = Path(source).read_text()
    plain = Path(source).with_name("plain.py")
    plain.write_text(text.replace("mean_logits(outputs, weights)", "mean_logits(outputs)"))
    torch.testing.assert_close(
        weights(alike), weights(run_small(f"{plain}:ByConfidence", **PROXY)), rtol=1e-3, atol=1e-4
    )
    first = text.replace("mean_logits(outputs, weights)", "mean_logits(outputs, (sure == sure.amax(0)).float())")
    plain.with_name("first.py").write_text(first)
    surest = run_small(f"{plain.with_name('first.py')}:ByConfidence", **PROXY)
    torch.testing.assert_close(weights(sharp), weights(surest), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_server_side_in_a_file_follows_any_client_side_and_resumes(
    run_small: RunSmall, by_confidence: str, tmp_path: Path
) -> None:
    name = f"fedgkd+{by_confidence}+t1"
    whole = run_small(name, **PROXY | {"rounds": 2})
    run_small(name, **PROXY, out=tmp_path / "run")
    assert torch.equal(weights(fedstill.resume(tmp_path / "run", rounds=2)), weights(whole))
    other = run_small("fedgkd+t1", pool=0.1, rounds=2)
    assert not torch.equal(weights(other), weights(whole))


@pytest.mark.slow
def test_the_python_of_the_api_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in blocks("docs/api.md", "python"):
        exec(compile(code, "api.md", "exec"), names)  # noqa: S102 - the page under test


@pytest.mark.slow
def test_the_method_of_the_page_runs_the_same_on_both_engines(run_small: RunSmall, slow_teacher: str) -> None:
    inline = run_small(slow_teacher, gamma=0.5)
    processes = run_small(slow_teacher, gamma=0.5, engine="process", workers=2)
    assert torch.equal(weights(inline), weights(processes))
    declared = 2 * 4 * inline.summary["parameters"]
    assert inline.records[0]["bytes_down"] == 3 * declared, "two models go down to three clients"


def test_the_method_of_the_page_with_everything_off_is_fedavg(run_small: RunSmall, slow_teacher: str) -> None:
    plain = run_small("fedavg")
    off = run_small(slow_teacher, gamma=0.0, mu=0.0, step=1.0)
    torch.testing.assert_close(weights(off), weights(plain), rtol=1e-4, atol=1e-6)


def test_the_readmes_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    original = fedstill.run

    def short(*args: object, **kwargs: object) -> object:
        small = {k: v for k, v in SMALL.items() if k not in ("model", "image_size", "fraction")}
        return original(*args, **(kwargs | small))  # type: ignore[arg-type]

    monkeypatch.setattr(fedstill, "run", short, raising=False)
    examples = blocks("README.md", "python")
    assert set(examples) <= set(blocks("docs/getting-started.md", "python"))
    for code in examples:
        exec(compile(code, "README.md", "exec"), {})  # noqa: S102 - the page under test


def test_the_readmes_results_are_those_of_the_page_of_results() -> None:
    """FedAvg's number, the method's, their difference and the verdict stand there together in one row."""
    rows = [[cell.strip() for cell in line.split("|")] for line in (ROOT / "README.md").read_text().splitlines()]
    shown = [
        row[3:7] for row in rows if row[-2:-1] and row[-2] in ("confirmed", "contradicted", "not seen at this scale")
    ]
    judged = [line.split(" | ") for line in (ROOT / "docs" / "results.md").read_text().splitlines()]
    known = [[row[4], row[3], row[5], row[9].removesuffix(" |")] for row in judged if len(row) == 10]
    assert len(shown) == 10
    assert [row for row in shown if row not in known] == []


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
