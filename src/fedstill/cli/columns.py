"""`fedstill columns`: what a table's columns and classes are, as settings of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedstill.cli.settings import option

Target = Annotated[str, option("target")]
ClientColumn = Annotated[str, option("client_column")]
Names = Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Leave this column out; can be repeated.")]
Categorical = Annotated[
    list[str] | None, typer.Option(metavar="COLUMN", help="Whole numbers that stand for categories; can be repeated.")
]
NamesOnly = Annotated[
    bool,
    typer.Option("--names-only", help="Write no means and no categories: the clients' rows are to give them."),
]


def columns(
    path: Annotated[Path, typer.Argument(help="A table: .csv, .tsv or .parquet.")],
    target: Target,
    client_column: ClientColumn = "",
    categorical: Categorical = None,
    drop: Names = None,
    names_only: NamesOnly = False,
) -> None:
    """Write down what a table's columns and classes are, for runs that are to use just that.

    \b
    fedstill columns public.csv --target outcome > columns.toml
    fedstill serve columns.toml --keys trial          (a server without data of its own)
    fedstill run columns.toml --data patients.csv

    With all means and categories in the settings, no site is asked for any.
    """
    import tomli_w

    from fedstill.data.formats.table import TableSettings, read

    found = read(path, TableSettings(target, client_column, "", tuple(categorical or ()), tuple(drop or ())))
    assert found.table is not None
    listed: list[dict[str, Any]] = []
    for column in found.table.columns:
        if column.categories is not None:
            listed.append({"name": column.name, "categories": [] if names_only else list(column.categories)})
        else:
            known = {"mean": column.mean, "std": column.std, "missing": column.missing}
            listed.append({"name": column.name} | ({} if names_only else known))
    settings = {"data": "", "target": target, "classes": list(found.classes), "columns": listed}
    print(tomli_w.dumps(settings), end="")
