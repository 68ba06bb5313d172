//! Faults of the Hub. None of them leaves a bad blob in the cache.

use std::time::Duration;

use candlewick_text::hub::{Hub, HubError, HubSettings, ModelFiles};

use super::Bench;
use super::server::{FOREVER, HubServer, Reply, Repo, etag};

const ID: &str = "tiny/llama";
const WEIGHTS: &str = "all the weights";

fn repo() -> Repo {
    Repo::new("models/tiny/llama", &[("config.json", "{}"), ("model.safetensors", WEIGHTS)])
}

fn bench() -> Bench {
    Bench::new(HubServer::start([repo()]))
}

#[track_caller]
fn fails(hub: &Hub, id: &str, revision: Option<&str>, want: &[&str]) -> HubError {
    let error = hub.model(id, revision, ModelFiles::All).unwrap_err();
    let text = error.to_string();
    for want in want {
        assert!(text.contains(want), "{want:?} is not in {text:?}");
    }
    error
}

/// Checks that the cache has no weights, and that a later download succeeds.
#[track_caller]
fn recovers(bench: &Bench) {
    assert_eq!(bench.blobs(), [etag("config.json", b"{}")]);
    let folder = bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(std::fs::read_to_string(folder.join("model.safetensors")).unwrap(), WEIGHTS);
}

#[test]
fn gated_says_where_to_accept_and_what_to_set() {
    let bench = Bench::new(HubServer::start([repo().gated_by("hf_secret")]));
    let page = format!("accept its terms at {}/tiny/llama", bench.server.endpoint());
    fails(&bench.hub(), ID, None, &["401", &page, "set HF_TOKEN", "is restricted"]);
    let wrong = HubSettings { token: Some("hf_wrong".into()), ..bench.settings() };
    fails(&Hub::new(wrong).unwrap(), ID, None, &["HF_TOKEN is not accepted"]);
}

#[test]
fn missing_repositories_revisions_and_files_have_different_errors() {
    let bench = bench();
    fails(&bench.hub(), "tiny/lama", None, &["find the model tiny/lama", "check the spelling"]);
    fails(&bench.hub(), ID, Some("v2"), &["revision \"v2\"", "no such branch"]);
    bench.server.answer("HEAD", "config.json", 1, Reply::new(404, "").header("X-Error-Code", "EntryNotFound"));
    fails(&bench.hub(), ID, None, &["find config.json in tiny/llama"]);
    fails(&bench.hub(), "https://huggingface.co/tiny/llama", None, &["did you mean tiny/llama?"]);
}

#[test]
fn too_many_requests_are_waited_out() {
    let bench = bench();
    let busy = || Reply::new(429, "").header("Retry-After", 0);
    bench.server.answer("GET", "/revision/", 2, busy());
    bench.server.answer("GET", "/tree/", 1, busy());
    bench.server.answer("HEAD", "model.safetensors", 1, busy());
    bench.server.answer("GET", "model.safetensors", 1, busy());
    bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(bench.server.count("GET", "/revision/"), 3);
}

#[test]
fn retry_after_is_obeyed() {
    let bench = bench();
    bench.server.answer("HEAD", "config.json", 1, Reply::new(429, "").header("Retry-After", 1));
    let start = std::time::Instant::now();
    bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert!(start.elapsed().as_secs_f64() >= 1.0);
}

#[test]
fn too_many_requests_for_good_are_reported() {
    let bench = bench();
    bench.server.answer("HEAD", "config.json", FOREVER, Reply::new(429, "").header("Retry-After", 0));
    fails(&bench.hub(), ID, None, &["too many requests", "tried 5 times", "a wait of 0 s"]);
    assert_eq!(bench.server.count("HEAD", "config.json"), 5);
}

#[test]
fn a_wait_beyond_reason_is_reported_at_once() {
    let bench = bench();
    bench.server.answer("GET", "/revision/", FOREVER, Reply::new(429, "").header("Retry-After", 86_400));
    fails(&bench.hub(), ID, None, &["tried once", "a wait of 86400 s"]);
}

#[test]
fn a_server_error_may_pass() {
    let bench = bench();
    bench.server.answer("GET", "/tree/", 2, Reply::new(503, ""));
    bench.hub().model(ID, None, ModelFiles::All).unwrap();
    let bench = self::bench();
    bench.server.answer("GET", "/revision/", FOREVER, Reply::new(500, "{\"error\":\"out of order\"}"));
    fails(&bench.hub(), ID, None, &["answers 500: out of order"]);
}

#[test]
fn a_refused_body_after_a_good_head_is_no_blob() {
    let bench = bench();
    bench.server.answer("GET", "model.safetensors", 1, Reply::new(403, "<Error>expired</Error>"));
    fails(&bench.hub(), ID, None, &["access is refused (403)"]);
    recovers(&bench);
}

#[test]
fn a_cut_body_is_continued_where_it_stopped() {
    let bench = bench();
    bench.server.answer("GET", "model.safetensors", 1, Reply::new(200, WEIGHTS).cut_at(7));
    let folder = bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(std::fs::read_to_string(folder.join("model.safetensors")).unwrap(), WEIGHTS);
    let log = bench.server.log();
    assert!(log.iter().any(|request| request.header("range") == Some("bytes=7-")));
}

#[test]
fn a_body_is_continued_as_often_as_some_more_of_it_arrives() {
    let bench = bench();
    bench.server.answer("GET", "model.safetensors", 1, Reply::new(200, WEIGHTS).cut_at(1));
    for n_bytes in 1..14 {
        bench.server.answer("GET", "model.safetensors", 1, Reply::new(206, &WEIGHTS[n_bytes..]).cut_at(1));
    }
    let folder = bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(std::fs::read_to_string(folder.join("model.safetensors")).unwrap(), WEIGHTS);
    assert_eq!(bench.server.log().last().unwrap().header("range"), Some("bytes=14-"));
}

#[test]
fn a_body_that_never_comes_is_an_error_and_no_blob() {
    let bench = bench();
    bench.server.answer("GET", "model.safetensors", 5, Reply::new(200, WEIGHTS).cut_at(0));
    fails(&bench.hub(), ID, None, &["model.safetensors", "closed after 0 of 15 bytes", "starts over"]);
    recovers(&bench);
}

/// Checks that the first 7 bytes of the weights are kept and the download is resumed.
#[track_caller]
fn goes_on_after_7(bench: &Bench) {
    let partial = format!("{}.incomplete", etag("model.safetensors", WEIGHTS.as_bytes()));
    assert!(bench.blobs().contains(&partial), "{:?}", bench.blobs());
    let folder = bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(std::fs::read_to_string(folder.join("model.safetensors")).unwrap(), WEIGHTS);
    assert_eq!(bench.server.log().last().unwrap().header("range"), Some("bytes=7-"));
    assert_eq!(bench.blobs().len(), 2);
}

#[test]
fn bytes_with_a_verifiable_hash_are_kept_after_any_failure() {
    for refusal in [Reply::new(403, ""), Reply::new(429, "").header("Retry-After", 86_400), Reply::new(501, "")] {
        let bench = bench();
        bench.server.answer("GET", "model.safetensors", 1, Reply::new(200, WEIGHTS).cut_at(7));
        bench.server.answer("GET", "model.safetensors", 2, refusal);
        fails(&bench.hub(), ID, None, &[ID]);
        goes_on_after_7(&bench);
    }
}

#[test]
fn a_broken_download_says_whether_its_bytes_were_kept() {
    let bench = bench();
    bench.server.answer("GET", "model.safetensors", 1, Reply::new(200, WEIGHTS).cut_at(7));
    bench.server.answer("GET", "model.safetensors", 9, Reply::new(206, &WEIGHTS[7..]).cut_at(0));
    fails(&bench.hub(), ID, None, &["closed after 7 of 15 bytes", "they are kept"]);
    goes_on_after_7(&bench);
    let bench = self::bench();
    bench.server.answer("GET", "config.json", 5, Reply::new(200, "{}").cut_at(1));
    fails(&bench.hub(), ID, None, &["closed after 1 of 2 bytes", "starts over"]);
    assert!(bench.blobs().is_empty());
}

#[test]
fn a_silent_hub_is_given_up() {
    let bench = bench();
    bench.server.answer("GET", "/revision/", FOREVER, Reply::silence());
    let settings = HubSettings { read_timeout: Duration::from_secs(1), max_attempts: 2, ..bench.settings() };
    fails(&Hub::new(settings).unwrap(), ID, None, &["reach", "timed out"]);
    assert_eq!(bench.server.count("GET", "/revision/"), 2);
}

#[test]
fn a_hub_that_drips_is_given_up() {
    let impatient = |bench: &Bench, read_timeout: u64| {
        let read_timeout = Duration::from_millis(read_timeout);
        Hub::new(HubSettings { read_timeout, max_attempts: 2, ..bench.settings() }).unwrap()
    };
    let text = " ".repeat(100_000);
    let slow = Reply::new(200, &text).drip();
    let bench = bench();
    bench.server.answer("GET", "/tree/", FOREVER, slow.clone());
    fails(&impatient(&bench, 1000), ID, None, &["the listing of tiny/llama", "fewer than 1024 bytes a second"]);
    assert_eq!(bench.server.count("GET", "/tree/"), 1);
    let bench = Bench::new(HubServer::start([repo().with("config.json", text.as_bytes())]));
    bench.server.answer("GET", "config.json", FOREVER, slow);
    fails(&impatient(&bench, 1000), ID, None, &["config.json", "fewer than 1024 bytes a second"]);
    assert_eq!(bench.server.count("GET", "config.json"), 1);
}

#[test]
fn a_hub_that_only_refuses_to_serve_leaves_the_cache() {
    for (status, said) in [(429, "too many requests"), (503, "answers 503")] {
        let bench = bench();
        let small = bench.hub().model(ID, None, ModelFiles::WithoutWeights).unwrap();
        bench.server.answer("GET", "/revision/", FOREVER, Reply::new(status, "").header("Retry-After", 0));
        assert_eq!(bench.hub().model(ID, None, ModelFiles::WithoutWeights).unwrap(), small);
        fails(&bench.hub(), ID, None, &[said]);
    }
    let bench = bench();
    bench.hub().model(ID, None, ModelFiles::All).unwrap();
    bench.server.answer("GET", "/revision/", FOREVER, Reply::new(403, ""));
    fails(&bench.hub(), ID, None, &["access is refused (403)"]);
}

#[test]
fn a_small_file_that_is_cut_starts_over() {
    let bench = bench();
    bench.server.answer("GET", "config.json", 1, Reply::new(200, "{}").cut_at(1));
    let folder = bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(std::fs::read_to_string(folder.join("config.json")).unwrap(), "{}");
    assert!(bench.server.log().iter().all(|request| request.header("range").is_none()));
}

#[test]
fn a_body_of_the_wrong_size_is_removed_and_downloaded_once_more() {
    let bench = bench();
    bench.server.answer("GET", "model.safetensors", 1, Reply::new(200, "short"));
    bench.hub().model(ID, None, ModelFiles::All).unwrap();

    let bench = self::bench();
    bench.server.answer("GET", "model.safetensors", 2, Reply::new(200, "short"));
    fails(&bench.hub(), ID, None, &["5 bytes arrived where 15 were announced", "removed"]);
    recovers(&bench);

    let bench = self::bench();
    bench.server.answer("GET", "model.safetensors", 2, Reply::new(200, &WEIGHTS.repeat(9)));
    fails(&bench.hub(), ID, None, &["more than the 15 bytes announced"]);
    recovers(&bench);
}

#[test]
fn a_body_of_the_wrong_hash_is_removed_and_downloaded_once_more() {
    let bench = bench();
    bench.server.answer("GET", "model.safetensors", 2, Reply::new(200, "all the weighty"));
    let announced = etag("model.safetensors", WEIGHTS.as_bytes());
    fails(&bench.hub(), ID, None, &["its sha256 is", &announced]);
    assert_eq!(bench.server.log().iter().filter(|r| r.method == "GET" && r.target.contains("model.s")).count(), 2);
    recovers(&bench);
}

#[test]
fn a_cached_file_of_the_wrong_size_is_replaced() {
    let bench = bench();
    let folder = bench.hub().model(ID, None, ModelFiles::All).unwrap();
    std::fs::write(folder.join("model.safetensors"), "damaged").unwrap();
    bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(std::fs::read_to_string(folder.join("model.safetensors")).unwrap(), WEIGHTS);
}

#[test]
fn a_head_without_an_etag_is_an_error() {
    let bench = bench();
    bench.server.answer("HEAD", "config.json", 1, Reply::new(200, "{}"));
    fails(&bench.hub(), ID, None, &["without a usable ETag"]);
    bench.server.answer("HEAD", "config.json", 1, Reply::new(200, "{}").header("ETag", "\"../../x\""));
    fails(&bench.hub(), ID, None, &["without a usable ETag"]);
}

#[test]
fn an_endless_redirect_ends() {
    let bench = bench();
    let round = Reply::new(307, "").header("Location", "/tiny/llama/resolve/x/config.json");
    bench.server.answer("HEAD", "config.json", FOREVER, round);
    fails(&bench.hub(), ID, None, &["redirects"]);
}

#[test]
fn an_answer_that_is_no_json_is_an_error() {
    let bench = bench();
    bench.server.answer("GET", "/revision/", 1, Reply::new(200, "<html>please log in</html>"));
    fails(&bench.hub(), ID, None, &["cannot be read"]);
    bench.server.answer("GET", "/revision/", 1, Reply::new(200, "{\"id\":\"x\",\"sha\":\"../..\"}"));
    fails(&bench.hub(), ID, None, &["the Hub names \"../..\" as the commit"]);
}

#[test]
fn out_of_reach_without_a_cache_names_the_endpoint() {
    let bench = bench();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let settings = HubSettings { endpoint: format!("http://{port}"), ..bench.settings() };
    let hub = Hub::new(settings).unwrap();
    fails(&hub, ID, None, &[&port.to_string(), "refused", "HF_HUB_OFFLINE=1"]);
    bench.hub().model(ID, None, ModelFiles::All).unwrap();
    hub.model(ID, None, ModelFiles::All).unwrap();
}

#[test]
fn offline_uses_the_cache_and_only_the_cache() {
    let bench = bench();
    fails(
        &bench.offline(),
        ID,
        None,
        &["offline: the cache has no files of revision \"main\"; fetch", "hf download tiny/llama`"],
    );
    let online = bench.hub().model(ID, None, ModelFiles::WithoutWeights).unwrap();
    let n_requests = bench.server.log().len();
    assert_eq!(bench.offline().model(ID, None, ModelFiles::WithoutWeights).unwrap(), online);
    fails(&bench.offline(), ID, None, &["model.safetensors is not in the cache", "unset HF_HUB_OFFLINE"]);
    fails(&bench.offline(), ID, Some("v2"), &["hf download tiny/llama --revision v2"]);
    assert_eq!(bench.server.log().len(), n_requests);
}

#[test]
fn an_answer_about_another_commit_or_file_is_refused() {
    let (asked, other) = (repo().commit().to_owned(), "1".repeat(40));
    let bench = bench();
    let answer = format!("{{\"id\":\"x\",\"sha\":\"{other}\"}}");
    bench.server.answer("GET", "/revision/", 1, Reply::new(200, &answer));
    fails(&bench.hub(), ID, Some(&asked), &[&asked, &other, "was requested", "HF_ENDPOINT"]);
    let head = |size: usize, sha256: &str, commit: &str| {
        let reply = Reply::new(302, "").header("Location", "http://127.0.0.1:1/").header("X-Linked-Size", size);
        reply.header("X-Linked-Etag", format!("\"{sha256}\"")).header("X-Repo-Commit", commit)
    };
    let sha256 = etag("model.safetensors", WEIGHTS.as_bytes());
    for (reply, want) in [
        (head(14, &sha256, &asked), "its size is announced as 14, but the file list has 15"),
        (head(15, &"0".repeat(64), &asked), "its sha256 is announced as 000"),
        (head(15, &sha256, &other), "the file is of the commit 111"),
    ] {
        bench.server.answer("HEAD", "model.safetensors", 1, reply);
        fails(&bench.hub(), ID, Some(&asked), &["model.safetensors", want]);
    }
    recovers(&bench);
}

#[test]
fn a_file_list_without_end_is_refused() {
    let page = r#"[{"type": "file", "oid": "a", "size": 2, "path": "config.json"}]"#;
    let endless = "[".repeat(33 << 20);
    for (body, wants) in [
        (page, &["its file list names \"config.json\" twice"][..]),
        ("[]", &["a page of its file list is empty, but another page follows"]),
        (&endless, &["the listing of tiny/llama", "more than 33554432 bytes"]),
    ] {
        let bench = bench();
        let next = format!("<{}/api/models/tiny/llama/tree/x?cursor=1>; rel=\"next\"", bench.server.endpoint());
        bench.server.answer("GET", "/tree/", FOREVER, Reply::new(200, body).header("Link", next));
        fails(&bench.hub(), ID, None, wants);
        assert!(bench.server.count("GET", "/tree/") <= 2);
    }
}

#[test]
fn the_token_does_not_follow_a_file_list_to_another_host() {
    let (bench, elsewhere) = (Bench::new(HubServer::start([repo().gated_by("hf_secret")])), bench());
    let page = r#"[{"type": "file", "oid": "a", "size": 2, "path": "config.json"}]"#;
    let rest = r#"[{"type": "file", "oid": "a", "size": 15, "path": "model.safetensors"}]"#;
    let next = format!("<{}/api/models/tiny/llama/tree/x>; rel=\"next\"", elsewhere.server.endpoint());
    bench.server.answer("GET", "/tree/", 1, Reply::new(200, page).header("Link", next));
    elsewhere.server.answer("GET", "/tree/", 1, Reply::new(200, rest));
    let settings = HubSettings { token: Some("hf_secret".into()), ..bench.settings() };
    Hub::new(settings).unwrap().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(elsewhere.server.count("GET", "/tree/"), 1);
    assert!(elsewhere.server.log().iter().all(|request| request.header("authorization").is_none()));
    assert!(bench.server.log().iter().any(|request| request.header("authorization").is_some()));
}

/// Returns the folder of the repository in the cache.
fn repo_folder(bench: &Bench) -> std::path::PathBuf {
    bench.cache.path().join("models--tiny--llama")
}

#[test]
fn a_link_out_of_the_cache_is_not_followed_to_write_or_remove() {
    use std::os::unix::fs::symlink;
    let outside = tempfile::tempdir().unwrap();
    let victim = outside.path().join("victim");
    let sha256 = etag("model.safetensors", WEIGHTS.as_bytes());
    // The name of a link in the repository's folder or in `.locks`.
    for name in [
        format!("snapshots/{}/model.safetensors", repo().commit()),
        format!("blobs/{sha256}"),
        format!("blobs/{sha256}.incomplete"),
        format!(".locks/{sha256}.lock"),
    ] {
        let bench = bench();
        std::fs::write(&victim, "of the user").unwrap();
        let path = match name.strip_prefix(".locks") {
            Some(name) => bench.cache.path().join(".locks/models--tiny--llama").join(&name[1..]),
            None => repo_folder(&bench).join(&name),
        };
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(&victim, &path).unwrap();
        let found = bench.hub().model(ID, None, ModelFiles::All);
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "of the user", "{name}");
        match name.starts_with(".locks") {
            true => assert!(found.unwrap_err().to_string().contains(&sha256), "{name}"),
            false => {
                let weights = found.unwrap().join("model.safetensors");
                assert_eq!(std::fs::read_to_string(weights).unwrap(), WEIGHTS, "{name}");
            }
        }
    }
    // A folder that is a link is refused by name.
    for name in ["blobs", "snapshots", "refs", ".listings"] {
        let bench = bench();
        std::fs::create_dir_all(repo_folder(&bench)).unwrap();
        symlink(outside.path(), repo_folder(&bench).join(name)).unwrap();
        fails(&bench.hub(), ID, None, &[name, "out of the repository's folder"]);
        assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 1, "{name}");
    }
}

#[test]
fn a_blob_on_another_disk_is_read_and_keeps_its_file() {
    let bench = bench();
    let folder = bench.hub().model(ID, None, ModelFiles::All).unwrap();
    let (blob, disk) = (std::fs::canonicalize(folder.join("model.safetensors")).unwrap(), tempfile::tempdir().unwrap());
    let moved = disk.path().join("weights");
    std::fs::rename(&blob, &moved).unwrap();
    std::os::unix::fs::symlink(&moved, &blob).unwrap();
    let n_requests = bench.server.count("GET", "model.safetensors");
    bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(bench.server.count("GET", "model.safetensors"), n_requests);
    std::fs::write(&moved, "other").unwrap();
    bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(std::fs::read_to_string(folder.join("model.safetensors")).unwrap(), WEIGHTS);
    assert_eq!(std::fs::read_to_string(&moved).unwrap(), "other");
    // A whole repository may be on another disk.
    let there = disk.path().join("repository");
    std::fs::rename(repo_folder(&bench), &there).unwrap();
    std::os::unix::fs::symlink(&there, repo_folder(&bench)).unwrap();
    std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(std::fs::read_to_string(folder.join("model.safetensors")).unwrap(), WEIGHTS);
}
