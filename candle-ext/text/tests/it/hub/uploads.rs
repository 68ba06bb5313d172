//! Upload of a folder: requests, faults and the repository afterwards.

use std::path::Path;

use candlewick_text::hub::{FolderUpload, Hub, HubError, HubSettings, RepoId, RepoKind, RepoVisibility};
use tempfile::TempDir;

use super::Bench;
use super::server::{FOREVER, HubServer, Reply, Repo};

const TOKEN: &str = "hf_secret";

fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in [
        ("README.md", "# hello".as_bytes()),
        ("empty.txt", b""),
        ("model.safetensors", b"weights of the model"),
        (".candlewick_export.json", b"not uploaded"),
    ] {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

fn push(bench: &Bench, token: Option<&str>, folder: &Path, visibility: RepoVisibility) -> Result<String, HubError> {
    let repo = RepoId::parse(RepoKind::Model, "me/model").unwrap();
    let hub = Hub::new(HubSettings { token: token.map(str::to_owned), ..bench.settings() }).unwrap();
    hub.upload(&FolderUpload { repo: &repo, folder, visibility, message: "Upload" }, None)
}

#[track_caller]
fn check(bench: &Bench, is_private: bool) {
    let repo = bench.server.repo("models/me/model").unwrap();
    assert_eq!(repo.is_private(), is_private);
    assert_eq!(repo.file("README.md"), Some(&b"# hello"[..]));
    assert_eq!(repo.file("empty.txt"), Some(&b""[..]));
    assert_eq!(repo.file("model.safetensors"), Some(&b"weights of the model"[..]));
    assert_eq!(repo.file(".candlewick_export.json"), None);
}

#[test]
fn a_folder_becomes_a_private_repository() {
    let bench = Bench::new(HubServer::start([]));
    let url = push(&bench, Some(TOKEN), folder().path(), RepoVisibility::Private).unwrap();
    assert_eq!(url, format!("{}/me/model", bench.server.endpoint()));
    check(&bench, true);
    assert_eq!(bench.server.count("PUT", "/lfs/whole/"), 1);
}

#[test]
fn an_existing_repository_gets_a_commit_and_known_files_are_not_sent_again() {
    let bench = Bench::new(HubServer::start([Repo::new("models/me/model", &[("old.txt", "old")])]));
    for _ in 0..2 {
        push(&bench, Some(TOKEN), folder().path(), RepoVisibility::Private).unwrap();
        check(&bench, false);
    }
    assert!(bench.server.repo("models/me/model").unwrap().file("old.txt").is_some());
    assert_eq!(bench.server.count("PUT", "/lfs/"), 1);
}

#[test]
fn a_large_file_is_sent_in_chunks() {
    let bench = Bench::new(HubServer::start_with([], Some(7)));
    push(&bench, Some(TOKEN), folder().path(), RepoVisibility::Public).unwrap();
    check(&bench, false);
    assert_eq!(bench.server.count("PUT", "/lfs/part/"), 3);
}

#[test]
fn a_request_to_a_busy_server_is_retried() {
    let bench = Bench::new(HubServer::start([]));
    for part in ["/preupload/", "/objects/batch", "/commit/"] {
        bench.server.answer("POST", part, 1, Reply::new(503, ""));
    }
    bench.server.answer("PUT", "/lfs/", 1, Reply::new(500, ""));
    push(&bench, Some(TOKEN), folder().path(), RepoVisibility::Private).unwrap();
    check(&bench, true);
}

#[test]
fn a_refusal_names_the_remedy_and_hides_the_token() {
    for (part, status, want) in [
        ("/repos/create", 401, "HF_TOKEN is not accepted"),
        ("/repos/create", 403, "may not write there"),
        ("/commit/", 500, "answers 500 after 5 tries: the disk is full hf_secret"),
    ] {
        let bench = Bench::new(HubServer::start([]));
        let reply = Reply::new(status, &format!("{{\"error\": \"the disk is full {TOKEN}\"}}"));
        bench.server.answer("POST", part, FOREVER, reply);
        let folder = folder();
        let error = push(&bench, Some(TOKEN), folder.path(), RepoVisibility::Private).unwrap_err().to_string();
        assert!(error.contains(&want.replace(TOKEN, "(token)")) && error.contains("push to me/model"), "{error}");
        assert!(!error.contains(TOKEN), "{error}");
        assert!(folder.path().join("model.safetensors").is_file());
    }
}

#[test]
fn no_request_is_sent_without_a_token() {
    let bench = Bench::new(HubServer::start([]));
    let error = push(&bench, None, folder().path(), RepoVisibility::Private).unwrap_err().to_string();
    assert!(error.contains("set HF_TOKEN"), "{error}");
    assert!(bench.server.log().is_empty());
}
