"""Who is let in, and for how long certificates are good."""

from __future__ import annotations

import datetime
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from support.commandline import fedstill

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedstill.core.errors import SettingError
from fedstill.flower import keys, node
from fedstill.flower.link import Certificates, FlowerLink


def made(folder: Path) -> Path:
    keys.make(folder, ["north", "south"], ["127.0.0.1"])
    return folder


def test_a_revoked_site_is_let_in_again_with_a_new_key_only(tmp_path: Path) -> None:
    folder = made(tmp_path / "trial")
    old = (folder / "sites/north.pub").read_bytes()
    keys.revoke(folder, "north")
    assert list(keys.public_keys(folder)) == ["south"]
    assert keys.revoked(folder) == {"north"}
    (tmp_path / "north.pub").write_bytes(old.strip() + b" somebody@elsewhere\n")
    with pytest.raises(SettingError, match="was revoked"):
        keys.add(folder, "north", tmp_path / "north.pub")
    keys.add(folder, "north")
    assert (folder / "sites/north.pub").read_bytes() != old
    assert (folder / "sites/north").stat().st_mode & 0o777 == 0o600
    assert keys.revoked(folder) == set()
    keys.revoke(folder, "north")
    assert len((folder / "revoked/north.pub").read_text().splitlines()) == 2


def test_what_cannot_be_added_or_revoked_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path / "trial")
    with pytest.raises(SettingError, match="did you mean 'north'"):
        keys.revoke(folder, "norht")
    with pytest.raises(SettingError, match="is there already"):
        keys.add(folder, "north")
    with pytest.raises(SettingError, match=r"\.\./west"):
        keys.add(folder, "../west")
    with pytest.raises(SettingError, match="cannot be read"):
        keys.add(folder, "west", folder / "ca.pem")
    assert not (folder / "sites/west.pub").exists()


def test_sites_have_names_in_any_script_but_none_that_looks_like_another(tmp_path: Path) -> None:
    keys.make(tmp_path / "keys", ["Köln", "東京"], ["127.0.0.1"])
    assert sorted(keys.public_keys(tmp_path / "keys")) == ["Köln", "東京"]
    for name in ("Ko\u0308ln", "a b", "../up", ".hidden", "x.pub"):  # the first is Köln in two code points
        with pytest.raises(SettingError, match="a name has letters"):
            keys.make(tmp_path / "others", [name], ["127.0.0.1"])


def test_the_command_line_makes_adds_and_revokes(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    assert fedstill("keys", str(folder), "--site", "north", "--host", "127.0.0.1").code == 0
    assert fedstill("keys", "add", str(folder), "west").code == 0
    assert fedstill("keys", "revoke", str(folder), "north").code == 0
    assert list(keys.public_keys(folder)) == ["west"]


def test_a_server_need_not_ever_have_a_sites_private_key(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    shown = fedstill("keys", folder, "--host", "127.0.0.1")
    assert shown.code == 0
    assert f"fedstill keys add {folder} NAME --public FILE" in " ".join(shown.out.split())
    (tmp_path / "west.pub").write_bytes(keys._pair()[1])
    assert fedstill("keys", "add", folder, "west", "--public", tmp_path / "west.pub").code == 0
    assert [path.name for path in (folder / "sites").iterdir()] == ["west.pub"]


def expired(folder: Path, *, authority: bool) -> Path:
    """Keys whose server's certificate has expired, and perhaps the authority's too."""
    valid, make_authority = keys._VALID, keys._authority

    def good_authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
        with patch.object(keys, "_VALID", valid):
            return make_authority(key)

    with (
        patch.object(keys, "_VALID", datetime.timedelta(minutes=-5)),
        patch.object(keys, "_authority", make_authority if authority else good_authority),
    ):
        return made(folder)


def test_a_server_with_an_expired_certificate_does_not_start(tmp_path: Path) -> None:
    folder = expired(tmp_path / "trial", authority=False)
    files = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    link = FlowerLink(
        tmp_path / "link", keys.public_keys(folder), host="127.0.0.1", port=1, certificates=files, most_bytes=1
    )
    with pytest.raises(SettingError, match=r"server\.pem expired on 20"), link:
        pass


def test_a_certificate_of_tomorrow_is_not_valid_yet(tmp_path: Path) -> None:
    folder = made(tmp_path / "trial")
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    with patch.object(keys, "datetime") as clock:
        clock.datetime.now.return_value = yesterday
        with pytest.raises(SettingError, match="not valid before"):
            keys.check_dates(folder / "server.pem")


@contextmanager
def listening_with_expired(place: Path) -> Iterator[tuple[Path, str]]:
    """A server whose certificate has expired: its keys, and its address."""
    folder = expired(place / "trial", authority=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            while True:
                try:
                    connection, _ = door.accept()
                except OSError:
                    return
                try:
                    context.wrap_socket(connection, server_side=True).close()
                except OSError:
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield folder, f"127.0.0.1:{door.getsockname()[1]}"
        door.shutdown(socket.SHUT_RDWR)


class Enough(Exception):
    pass


def test_a_site_names_an_expired_certificate_at_once_and_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise Enough

    with (
        listening_with_expired(tmp_path) as (folder, server),
        patch("fedstill.flower.node.time.sleep", sleep),
        caplog.at_level(logging.WARNING),
        pytest.raises(Enough),
    ):
        node._wait_for_server(server, folder / "ca.pem")
    assert [record.message for record in caplog.records if "has expired" in record.message] == [
        f"the certificate of {server} has expired; trying until it is valid: "
        "renew it there, or set the clock of this machine"
    ]
    assert pauses == [0.25, 0.5, 1.0]


def test_a_site_whose_authority_has_expired_stops(tmp_path: Path) -> None:
    folder = expired(tmp_path / "trial", authority=True)
    with pytest.raises(SettingError, match=r"ca\.pem expired on"):
        node._wait_for_server("127.0.0.1:1", folder / "ca.pem")
