"""The routes that only look: attention, what moved an answer, small scenes, studies, and the page's files."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving import client, make_service, secret_key

from regard.identity.read.recall import THRESHOLD
from regard.identity.store.imprinting import imprint_into
from regard.identity.store.replay import imprint_event
from regard.identity.write.rule import Rule
from regard.models.base import Look
from regard.serve.routes.static import FOLDER, page_files
from regard.serve.service import Service
from regard.serve.settings import Settings

TEXT = "My cat is called Mochi."


def ask(service: Service, path: str, body: Any = None, token: str | None = None, method: str = "POST") -> httpx.Response:
    async def send() -> httpx.Response:
        async with client(service, token) as c:
            return await c.request(method, path, json=body)

    return asyncio.run(send())


def tell(service: Service, name: str, text: str) -> None:
    """Somebody who was told something."""
    event = imprint_event(text, source="diary", rule=Rule())
    imprint_into(service.store, name, service.model, service.tokenizer, event, base=service.base)


@pytest.fixture
def everything_comes_to_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of random weights finds no question coherent with anything."""
    for encoder in (True, False):
        monkeypatch.setitem(THRESHOLD, encoder, -1e9)


def test_rows_of_a_layer_are_the_models_own(service: Service):
    body = ask(service, "/v1/attention", {"text": TEXT, "layer": 1, "heads": [2], "rows": [4, 6]}).json()
    tokens = [t["id"] for t in body["tokens"]]
    with torch.no_grad():
        whole = service.model(torch.tensor([tokens]), look=Look(attention=True)).attended[1].weights()[0, 2]
    assert [r["query"] for r in body["rows"]] == [4, 5]
    for row in body["rows"]:
        (head,) = row["heads"]
        assert head["weights"] == pytest.approx(whole[row["query"], : row["query"] + 1].tolist(), abs=1e-5)
        assert head["accepted"] is True
    assert "".join(t["text"] for t in body["tokens"]) == TEXT
    assert (body["layers"], body["heads"], body["slots"]) == (2, 4, [])


def test_identity_to_whom_nothing_comes_to_mind_looks_as_the_model_does(service: Service):
    tell(service, "mara", "I am Mara.")
    own, hers = (ask(service, "/v1/attention", {"text": "Who?", **who}).json() for who in ({}, {"identity": "mara"}))
    assert own == hers


@pytest.mark.usefixtures("everything_comes_to_mind")
def test_keys_of_an_identity_come_first(service: Service):
    tell(service, "mara", "I am Mara.")
    body = ask(service, "/v1/attention", {"text": "Who?", "identity": "mara", "heads": [0]}).json()
    assert len(body["slots"]) > 0
    assert [len(r["heads"][0]["weights"]) for r in body["rows"]] == [len(body["slots"]) + i + 1 for i in range(4)]


def test_refused_rows_are_marked(service: Service):
    asked = {"text": TEXT, "spec": "abstain(softmax, null_logit=40)", "heads": [0]}
    assert not any(r["heads"][0]["accepted"] for r in ask(service, "/v1/attention", asked).json()["rows"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "one of them"),
        ({"text": "a", "tokens": [1]}, "one of them"),
        ({"text": TEXT, "layer": 9}, "layers 0 to 1"),
        ({"text": TEXT, "heads": [4]}, "heads 0 to 3"),
        ({"text": TEXT, "rows": [3, 99]}, "rows 0 to 23"),
        ({"text": TEXT, "spec": "nonsense"}, "nonsense"),
        ({"tokens": [1, 300]}, "token 300"),
        ({"text": TEXT, "identity": "nobody"}, "no identity"),
        ({"text": "x" * 900, "layer": 0}, "at a time"),
        ({"text": ""}, "1 to 4,096"),
    ],
)
def test_what_cannot_be_looked_at_is_refused_by_name(service: Service, body: dict[str, Any], said: str):
    answer = ask(service, "/v1/attention", body)
    assert answer.status_code in (400, 404)
    assert said in answer.json()["error"]["message"]


def test_heads_are_scored_layer_by_layer(service: Service):
    scores = ask(service, "/v1/attention/heads", {"text": TEXT}).json()["scores"]
    assert set(scores) == {"previous", "induction", "sink"}
    assert [len(layer) for layer in scores["sink"]] == [4, 4]
    assert all(0 <= x <= 1 for role in scores.values() for layer in role for x in layer)


@pytest.mark.usefixtures("everything_comes_to_mind")
def test_what_moved_an_answer_names_imprints(service: Service):
    tell(service, "mara", "I am Mara.")
    asked = {"identity": "mara", "messages": [{"role": "user", "content": "Who are you?"}], "answer": "Mara"}
    body = ask(service, "/v1/attention/moved", asked).json()
    assert "".join(t["text"] for t in body["tokens"]) == "Mara"
    for token in body["tokens"]:
        assert token["nats"] >= 0
        assert [b["nats"] for b in token["by"]] == sorted((b["nats"] for b in token["by"]), reverse=True)
    assert any(b["source"] == "diary" for t in body["tokens"] for b in t["by"])
    assert ask(service, "/v1/attention/moved", {**asked, "answer": ""}).status_code == 400


def test_why_explains_one_token(service: Service):
    tell(service, "mara", "I am Mara.")
    asked = {"identity": "mara", "text": "Who?", "answer": "Mara", "token": 2}
    body = ask(service, "/v1/attention/why", asked).json()
    assert body["token"] == "token 2, 'a'"
    assert len(body["layers"]) == 2
    assert ask(service, "/v1/attention/why", {**asked, "token": 9}).status_code == 400


def test_nobody_looks_into_another_persons_identity(service: Service):
    tell(service, "mara", "I am Mara.")
    tom = secret_key(service, "tom", ["read"], ["tom"])
    mine = secret_key(service, "mara", ["read"], ["mara"])
    for path, body in (
        ("/v1/attention", {"text": "a", "identity": "mara"}),
        ("/v1/attention/moved", {"text": "a", "identity": "mara", "answer": "b"}),
        ("/v1/attention/why", {"text": "a", "identity": "mara"}),
    ):
        other, nobody = (ask(service, path, {**body, "identity": who}, tom) for who in ("mara", "none"))
        assert other.status_code == nobody.status_code == 404
        assert other.json()["error"]["message"].replace("mara", "none") == nobody.json()["error"]["message"]
        assert ask(service, path, body, mine).status_code == 200


def test_scenes_are_played_and_knobs_are_listed(service: Service):
    scene = {"queries": [[0.1, 0.9]], "keys": [[0, 1], [1, 0]], "spec": "gd(coherence=1)"}
    assert ask(service, "/v1/mechanisms", scene).json()["jump"][0]["key"] == 0
    assert ask(service, "/v1/mechanisms", {**scene, "spec": "trace"}).status_code == 400
    assert "softmax" in [s["name"] for s in ask(service, "/v1/mechanisms", method="GET").json()["selection"]]


# -- studies -------------------------------------------------------------------------------------------------------------

PICTURE = b"\x89PNG\r\n\x1a\n rest"


@pytest.fixture
def studied(tmp_path: Path) -> Service:
    folder = tmp_path / "studies"
    folder.mkdir()
    good = {
        "study": "hopfield",
        "claim": "It stores.",
        "verdict": {"kind": "holds", "text": "holds"},
        "checks": [],
        "machine": {},
    }
    (folder / "hopfield.json").write_text(json.dumps(good))
    (folder / "hopfield.png").write_bytes(PICTURE)
    (folder / "broken.json").write_text("{")
    (folder / "other.json").write_text(json.dumps({**good, "study": "not_other"}))
    (folder / "text.png").write_bytes(b"<svg onload=alert(1)>")
    (tmp_path / "secret.png").write_bytes(PICTURE)
    return make_service(tmp_path, replace(Settings(), studies=str(folder)))


def test_measured_studies_are_listed_and_damaged_ones_left_out(studied: Service):
    (one,) = ask(studied, "/v1/studies", method="GET").json()["data"]
    assert (one["study"], one["verdict"]["kind"], one["figure"]) == ("hopfield", "holds", True)
    assert "machine" not in one


@pytest.mark.parametrize("name", ["none", "text", "..%2Fsecret", "../secret", "HOPFIELD"])
def test_figures_are_pictures_of_this_folder_alone(studied: Service, name: str):
    assert ask(studied, f"/v1/studies/{name}/figure", method="GET").status_code == 404
    good = ask(studied, "/v1/studies/hopfield/figure", method="GET")
    assert (good.status_code, good.content, good.headers["content-type"]) == (200, PICTURE, "image/png")


def test_folder_that_is_not_there_has_no_studies(tmp_path: Path):
    service = make_service(tmp_path, replace(Settings(), studies=str(tmp_path / "none")))
    assert ask(service, "/v1/studies", method="GET").json()["data"] == []


# -- the page ------------------------------------------------------------------------------------------------------------


def test_page_is_served_to_whoever_has_no_key(service: Service):
    secret_key(service, "me", ["admin"])
    page = ask(service, "/studio/", method="GET")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert ask(service, "/", method="GET").headers["location"] == "/studio/"


def test_every_file_that_the_page_names_is_there_and_no_other_host_is_named(service: Service):
    html = page_files()["index.html"].data.decode()
    named = {part.split('"')[0].removeprefix("./") for a in ('src="', 'href="') for part in html.split(a)[1:]}
    assert named
    for name in named - {"data:,"}:
        assert ask(service, f"/studio/{name}", method="GET").status_code == 200, name
    assert "<script>" not in html
    for name, file in page_files().items():
        assert b"https://" not in file.data.replace(b"https://svelte.dev/e/", b""), name


@pytest.mark.parametrize("path", ["../app.py", "..%2Fapp.py", "nothing.js", "assets/", "view/view.js", "%2e%2e/app.py"])
def test_nothing_but_the_page_is_served(service: Service, path: str):
    assert ask(service, f"/studio/{path}", method="GET").status_code == 404
    assert FOLDER.is_dir()


def test_page_that_did_not_change_is_not_sent_again(service: Service):
    async def twice() -> httpx.Response:
        async with client(service) as c:
            tag = (await c.get("/studio/")).headers["etag"]
            return await c.get("/studio/", headers={"if-none-match": tag})

    assert asyncio.run(twice()).status_code == 304
