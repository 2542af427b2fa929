"""Every promise of SECURITY.md that a test can keep, and the test that keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = {
    "no process opens these ports to other machines, unless `--insecure`": (
        "tests/serving/test_tls.py", "test_an_internal_port_is_not_open_to_others_by_mistake",
    ),
    "with `--tls-client-ca` only to clients with a certificate": (
        "tests/router/test_router_tls.py", "test_doors_speak_tls",
    ),
    "An expired or foreign one ends it before a call is read": (
        "tests/router/test_router_tls.py",
        "test_who_has_no_valid_certificate_is_refused_named_and_counted",
    ),
    "A worker joins under a name of its certificate alone": (
        "tests/router/test_router_tls.py", "test_a_worker_joins_by_its_own_name_alone",
    ),
    "only if its port shows the same name": (
        "tests/router/test_router_tls.py",
        "test_a_worker_that_names_the_port_of_another_is_refused",
    ),
    "A worker does the work of routers alone": (
        "tests/router/test_router_tls.py", "test_a_worker_serves_routers_alone",
    ),
    "announces itself to routers alone": (
        "tests/router/test_router_tls.py", "test_a_router_in_clear_is_told_from_one_with_tls",
    ),
    "A router takes spans from holders of a certificate alone": (
        "tests/router/test_router_tls.py", "test_spans_are_taken_from_members_alone",
    ),
    "Who is refused is named in the log and counted": (
        "tests/router/test_router_tls.py",
        "test_who_has_no_valid_certificate_is_refused_named_and_counted",
    ),
    "Certificates are replaced without a restart": (
        "tests/e2e/test_e2e_tls.py",
        "test_certificates_are_renewed_under_load_without_a_failed_request",
    ),
    "A replacement that is not valid is named in the log and not taken": (
        "tests/serving/test_tls.py", "test_a_good_replacement_is_taken_and_a_bad_one_is_named",
    ),
    "A worker that listens on loopback keeps UCX, NCCL and Gloo on": (
        "tests/e2e/test_e2e_tls.py", "test_every_process_listens_on_loopback_alone",
    ),
    "it is refused where TLS is on and the worker listens beyond loopback": (
        "tests/serving/test_tls.py", "test_settings_that_tls_cannot_protect_are_refused",
    ),
    "The folder has mode 0700 and the file 0600": (
        "tests/router/test_responses_store.py", "test_the_folder_is_this_users_alone",
    ),
    "links are refused": (
        "tests/router/test_responses_store.py", "test_a_folder_that_others_could_reach_is_refused",
    ),
    "a tenant's responses are not there for another": (
        "tests/router/test_responses_store.py", "test_another_tenants_responses_are_not_there",
    ),
    "under random names that no client chooses or learns": (
        "tests/router/test_batches.py", "test_another_tenants_files_and_batches_are_not_there",
    ),
    "**A worker names no folder on the router.**": (
        "tests/router/test_model_folders.py",
        "test_an_announced_folder_must_lie_below_an_allowed_one",
    ),
    "believes its workers": (
        "tests/router/test_model_folders.py", "test_a_worker_is_believed_on_loopback_alone",
    ),
    "`BATON_DEBUG_DOOR_METRICS=false` and `BATON_DEBUG_REFLECTION=false` turn them off": (
        "tests/router/test_router_tls.py",
        "test_figures_and_descriptions_stay_inside_if_wanted",
    ),
    "callers without a token are refused unread": ("tests/router/test_auth.py", "def test_"),
    "each tenant's pages are its own": ("tests/engine/test_prompt_keys.py", "def test_"),
}  # fmt: skip


@pytest.mark.parametrize("promise", KEPT)
def test_a_promise_has_its_test(promise: str) -> None:
    words = " ".join((ROOT / "SECURITY.md").read_text().split())
    assert promise in words
    file, name = KEPT[promise]
    assert name in (ROOT / file).read_text(), (file, name)
