"""A wrong request, and what has to be said of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest

from jaxdist.config import RequestError
from jaxdist.request import Extra, arguments


@dataclass
class Wrong:
    """A command line and what each sentence has to contain; FILE is the path of a config with the text `toml`, FOLDER
    that of its folder."""

    argv: str
    sentences: list[tuple[str, ...]]
    toml: str | bytes | None = None
    positional: str = "CONFIG"
    extras: list[Extra] = field(default_factory=list)

    def assert_told(self, tmp_path, monkeypatch) -> None:
        """Each sentence stands there, in this order, and no other; nothing is written."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        file = tmp_path / "my.toml"
        if self.toml is not None:
            file.write_bytes(self.toml if isinstance(self.toml, bytes) else self.toml.encode())
        argv = [word.replace("FILE", str(file)).replace("FOLDER", str(tmp_path)) for word in self.argv.split()]
        with pytest.raises(RequestError) as caught:
            arguments(argv, "evaluate", "", positional=self.positional, extras=self.extras)
        told = caught.value.problems
        assert len(told) == len(self.sentences), told
        for problem, fragments in zip(told, self.sentences, strict=True):
            assert all(fragment in problem for fragment in fragments), (problem, fragments)
            assert "\n" not in problem
            assert "Input should" not in problem
        assert sorted(os.listdir(tmp_path)) == ["my.toml"] * (self.toml is not None)


def named(tables: dict[str, dict[str, Wrong]]) -> dict[str, Wrong]:
    """Every case of the tables by its table and name."""
    return {f"{table}: {name}": case for table, cases in tables.items() for name, case in cases.items()}
