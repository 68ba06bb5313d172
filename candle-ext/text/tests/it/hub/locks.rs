//! Lock files: recorded commits and files, and runs that use only them.

use std::fs;
use std::path::Path;
use std::time::Duration;

use candlewick_text::hub::{DatasetRequest, Hub, HubLock, HubSettings, LockContext, ModelFiles, RepoId, RepoKind};
use sha2::{Digest, Sha256};

use super::Bench;
use super::server::{FOREVER, HubServer, Reply, Repo};

const ID: &str = "tiny/llama";

fn model() -> Repo {
    let weights = "all weights ".repeat(100);
    Repo::new(
        "models/tiny/llama",
        &[
            ("config.json", "{}"),
            ("model.safetensors", &weights),
            ("tokenizer.json", "{\"model\": {}}"),
            ("model.gguf", "other"),
        ],
    )
}

fn rows() -> Repo {
    Repo::new("datasets/tiny/rows", &[("train.jsonl", "{\"text\": \"a\"}\n"), ("test.jsonl", "{\"text\": \"b\"}\n")])
}

fn context() -> LockContext {
    LockContext { path: "r.yaml.lock".into(), prefetch: "trainer prefetch r.yaml".into() }
}

impl Bench {
    /// Returns the lock of the model, after its download.
    fn lock(&self, kept: Option<HubLock>) -> HubLock {
        let hub = self.hub().with_recorder(kept);
        hub.model(ID, None, ModelFiles::All).unwrap();
        hub.recorded()
    }

    fn locked(&self, lock: &HubLock) -> Hub {
        self.hub().with_lock(lock.clone(), context())
    }
}

fn commit_in(lock: &HubLock) -> &str {
    let repo = RepoId::parse(RepoKind::Model, ID).unwrap();
    &lock.find(&repo, "main").unwrap().commit
}

fn open(hub: &Hub, spec: &str) -> Result<usize, String> {
    let request = DatasetRequest::parse(spec, "train").map_err(|e| e.to_string())?;
    hub.dataset(&request).map(|rows| rows.len()).map_err(|e| e.to_string())
}

/// Overwrites a cached file with other bytes of the same length, and moves its modification time, which the clock of the file
/// system may not do within some milliseconds.
fn damage(path: &Path) {
    let found = fs::metadata(path).unwrap();
    fs::write(fs::canonicalize(path).unwrap(), "x".repeat(found.len() as usize)).unwrap();
    let later = found.modified().unwrap() + Duration::from_secs(1);
    fs::File::options().write(true).open(path).unwrap().set_modified(later).unwrap();
}

#[test]
fn a_lock_has_the_commit_and_the_hashes_of_the_used_files() {
    let bench = Bench::new(HubServer::start([model(), rows()]));
    let hub = bench.hub().with_recorder(None);
    hub.model(ID, None, ModelFiles::WithoutWeights).unwrap();
    hub.model(ID, Some("main"), ModelFiles::All).unwrap();
    assert_eq!(open(&hub, "tiny/rows"), Ok(1));
    let lock = hub.recorded();
    assert_eq!(lock.repositories.len(), 2);
    let [of_model, of_rows] = &lock.repositories[..] else { panic!("{lock:?}") };
    assert_eq!(
        (of_model.id.as_str(), of_model.revision.as_str(), of_model.commit.as_str()),
        (ID, "main", model().commit())
    );
    let paths: Vec<_> = of_model.files.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(paths, ["config.json", "model.safetensors", "tokenizer.json"]);
    let weights = of_model.file("model.safetensors").unwrap();
    let digest: String = Sha256::digest("all weights ".repeat(100)).iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!((weights.size, &weights.sha256), (1200, &digest));
    assert_eq!((of_rows.kind, of_rows.files.len()), (RepoKind::Dataset, 1));
    assert_eq!(lock.endpoint, bench.server.endpoint());
    assert_eq!(bench.server.count("GET", "model.safetensors"), 2, "the redirect and the file, once");
}

#[test]
fn a_branch_that_moves_meanwhile_has_one_commit_in_the_lock() {
    let bench = Bench::new(HubServer::start([rows()]));
    let hub = bench.hub().with_recorder(None);
    open(&hub, "tiny/rows").unwrap();
    let (tree, n_trees) = ("/tree/", bench.server.count("GET", "/tree/"));
    bench.server.answer(
        "GET",
        "/revision/",
        FOREVER,
        Reply::new(200, &format!("{{\"id\":\"x\",\"sha\":\"{}\"}}", "f".repeat(40))),
    );
    open(&hub, "tiny/rows:test").unwrap();
    let lock = hub.recorded();
    assert_eq!((lock.repositories.len(), lock.n_files()), (1, 2));
    assert_eq!(bench.server.count("GET", tree), n_trees);
}

#[test]
fn a_lock_keeps_its_commit_without_a_request() {
    let bench = Bench::new(HubServer::start([model()]));
    let lock = bench.lock(None);
    let newer = model().with("config.json", b"{\"new\": 1}");
    bench.server.replace(newer.clone());
    // Another run brings the newer commit into the cache.
    bench.hub().model(ID, None, ModelFiles::All).unwrap();
    let n_requests = bench.server.log().len();
    let folder = bench.locked(&lock).model(ID, None, ModelFiles::All).unwrap();
    assert!(folder.ends_with(model().commit()), "{}", folder.display());
    assert_eq!(bench.server.log().len(), n_requests);
    // A second prefetch keeps the commit, and does not move the branch of the cache back.
    assert_eq!(bench.lock(Some(lock.clone())), lock);
    assert!(bench.offline().model(ID, None, ModelFiles::All).unwrap().ends_with(newer.commit()));
    assert_eq!(commit_in(&bench.lock(None)), newer.commit());
}

#[test]
fn other_repositories_revisions_and_files_are_refused_by_name() {
    let bench = Bench::new(HubServer::start([model(), rows()]));
    let hub = bench.hub().with_recorder(None);
    hub.model(ID, None, ModelFiles::WithoutWeights).unwrap();
    open(&hub, "tiny/rows").unwrap();
    // The cache has the whole model, but the lock does not.
    bench.hub().model(ID, None, ModelFiles::All).unwrap();
    let locked = bench.locked(&hub.recorded());
    let refused =
        |name: &str, revision: Option<&str>| locked.model(name, revision, ModelFiles::All).unwrap_err().to_string();
    for (name, revision, want) in [
        ("tiny/other", None, "no entry for the model tiny/other at revision \"main\""),
        (ID, Some("v2"), "no entry for the model tiny/llama at revision \"v2\""),
        (ID, None, "no entry for model.safetensors of the model tiny/llama"),
    ] {
        let error = refused(name, revision);
        assert!(
            error.contains(want) && error.contains("run `trainer prefetch r.yaml`"),
            "{want:?} is not in {error:?}"
        );
    }
    assert_eq!(open(&locked, "tiny/rows"), Ok(1));
    let error = open(&locked, "tiny/rows:test").unwrap_err();
    assert!(error.contains("no entry for test.jsonl of the dataset tiny/rows"), "{error}");
}

#[test]
fn a_locked_file_that_the_cache_lacks_names_the_command() {
    let bench = Bench::new(HubServer::start([model()]));
    let lock = bench.lock(None);
    let elsewhere = Bench::new(HubServer::start([model()]));
    let error = elsewhere.locked(&lock).model(ID, None, ModelFiles::All).unwrap_err().to_string();
    assert!(error.contains("load tiny/llama at the commit in r.yaml.lock"), "{error}");
    // Files are looked up in parallel, so any of them may be the first that is missing.
    assert!(error.contains(".json is not in the cache; run `trainer prefetch r.yaml`"), "{error}");
    assert_eq!(elsewhere.server.log().len(), 0);
    // The command downloads the locked commit there.
    assert_eq!(elsewhere.lock(Some(lock.clone())), lock);
    elsewhere.locked(&lock).model(ID, None, ModelFiles::All).unwrap();
}

#[test]
fn a_commit_that_the_hub_has_no_longer_is_reported() {
    let bench = Bench::new(HubServer::start([model()]));
    let lock = bench.lock(None);
    let elsewhere = Bench::new(HubServer::start([model().with("config.json", b"{\"new\": 1}")]));
    let hub = elsewhere.hub().with_recorder(Some(lock.clone()));
    let error = hub.model(ID, None, ModelFiles::All).unwrap_err().to_string();
    assert!(error.contains(commit_in(&lock)) && error.contains("--update"), "{error}");
}

#[test]
fn a_damaged_file_in_the_cache_is_found_and_replaced() {
    let bench = Bench::new(HubServer::start([model()]));
    let lock = bench.lock(None);
    let folder = bench.locked(&lock).model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(bench.hub().verify(&lock).unwrap(), []);
    // Large files have their hash as name, small ones have it in the lock only.
    for file in ["model.safetensors", "config.json"] {
        damage(&folder.join(file));
        let faults = bench.hub().verify(&lock).unwrap();
        assert!(faults.len() == 1 && faults[0].file == file && faults[0].problem.contains("sha256"), "{faults:?}");
        assert_eq!(bench.lock(Some(lock.clone())), lock);
        assert_eq!(bench.hub().verify(&lock).unwrap(), []);
    }
    fs::remove_file(folder.join("tokenizer.json")).unwrap();
    assert_eq!(bench.hub().verify(&lock).unwrap()[0].problem, "it is not in the cache");
}

#[test]
fn an_interrupted_download_continues() {
    let bench = Bench::new(HubServer::start([model()]));
    let cut = Reply::new(200, &"all weights ".repeat(100)).cut_at(700);
    bench.server.answer("GET", "model.safetensors", 1, Reply::new(302, "").header("Location", "/cut"));
    bench.server.answer("GET", "/cut", 1, cut);
    // Retries continue while the last ones made progress.
    bench.server.answer("GET", "model.safetensors", 2, Reply::new(403, ""));
    let hub = Hub::new(HubSettings { max_attempts: 2, ..bench.settings() }).unwrap().with_recorder(None);
    let error = hub.model(ID, None, ModelFiles::All).unwrap_err().to_string();
    assert!(error.contains("access is refused (403)"), "{error}");
    bench.lock(None);
    let ranges: Vec<_> = bench.server.log().iter().filter_map(|r| r.header("range").map(str::to_owned)).collect();
    assert!(!ranges.is_empty() && ranges.iter().all(|range| range == "bytes=700-"), "{ranges:?}");
}

#[test]
fn a_copy_of_the_locked_files_works_without_links() {
    let bench = Bench::new(HubServer::start([model(), rows()]));
    let hub = bench.hub().with_recorder(None);
    hub.model(ID, None, ModelFiles::All).unwrap();
    open(&hub, "tiny/rows").unwrap();
    let lock = hub.recorded();
    let folder = tempfile::tempdir().unwrap();
    hub.copy_locked(&lock, folder.path()).unwrap();
    let settings = HubSettings { offline: true, ..HubSettings::new(folder.path()) };
    let copy = Hub::new(settings.clone()).unwrap();
    assert_eq!(copy.verify(&lock).unwrap(), []);
    // The copy also serves commands that have no lock.
    let model = copy.model(ID, None, ModelFiles::All).unwrap();
    assert!(fs::symlink_metadata(model.join("model.safetensors")).unwrap().is_file());
    let locked = Hub::new(settings).unwrap().with_lock(lock, context());
    assert_eq!(open(&locked, "tiny/rows"), Ok(1));
    damage(&model.join("model.safetensors"));
    let faults = locked.verify(locked.lock().unwrap().0).unwrap();
    assert_eq!(faults.len(), 1, "{faults:?}");
}

#[test]
fn a_recorder_does_not_fall_back_to_the_cache() {
    let bench = Bench::new(HubServer::start([model()]));
    bench.lock(None);
    bench.server.answer("GET", "/revision/", FOREVER, Reply::new(503, ""));
    let error = bench.hub().with_recorder(None).model(ID, None, ModelFiles::All).unwrap_err().to_string();
    assert!(error.contains("answers 503"), "{error}");
    // Offline, the cache is what the user wants.
    let hub = bench.offline().with_recorder(None);
    hub.model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(hub.recorded().n_files(), 3);
}

/// Checks that `hub` records no other lock than `lock`: an error, which contains `want`.
#[track_caller]
fn keeps(hub: Hub, lock: &HubLock, want: &[&str]) {
    let error = hub.with_recorder(Some(lock.clone())).model(ID, None, ModelFiles::All).unwrap_err().to_string();
    for want in want {
        assert!(error.contains(want), "{want:?} is not in {error:?}");
    }
}

#[test]
fn a_lock_is_not_recorded_anew_from_other_answers() {
    let bench = Bench::new(HubServer::start([model()]));
    let lock = bench.lock(None);
    let (commit, other) = (commit_in(&lock).to_owned(), "1".repeat(40));
    let elsewhere = |answers: &[(&'static str, Reply)]| {
        let bench = Bench::new(HubServer::start([model()]));
        for (part, reply) in answers {
            bench.server.answer("GET", part, FOREVER, reply.clone());
        }
        bench
    };
    let revision = Reply::new(200, &format!("{{\"id\":\"x\",\"sha\":\"{other}\"}}"));
    keeps(elsewhere(&[("/revision/", revision)]).hub(), &lock, &[&commit, &other, "was requested"]);
    let without = r#"[{"type": "file", "oid": "a", "size": 2, "path": "config.json"}, {"type": "file", "oid": "b", "size": 1200, "path": "model.safetensors"}]"#;
    let lacks = format!("the file list of the commit {commit} lacks tokenizer.json of the lock file");
    keeps(elsewhere(&[("/tree/", Reply::new(200, without))]).hub(), &lock, &[&lacks, "--update"]);
    let shorter = without
        .replace("1200", "1199")
        .replace("}]", "}, {\"type\": \"file\", \"oid\": \"c\", \"size\": 13, \"path\": \"tokenizer.json\"}]");
    let want = ["model.safetensors has 1199 bytes, but 1200 in the lock file"];
    keeps(elsewhere(&[("/tree/", Reply::new(200, &shorter))]).hub(), &lock, &want);
    let changed = elsewhere(&[("config.json", Reply::new(200, "[]"))]);
    keeps(changed.hub(), &lock, &["config.json differs from the lock file: its sha256 is ", "--update"]);
    // Offline, the branch of the cache may be at a newer commit.
    bench.server.replace(model().with("config.json", b"{\"new\": 1}"));
    bench.hub().model(ID, None, ModelFiles::All).unwrap();
    let offline = bench.offline().with_recorder(Some(lock.clone()));
    offline.model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(offline.recorded(), lock);
}

#[test]
fn a_locked_run_refuses_a_flipped_byte_and_hashes_a_file_once() {
    let bench = Bench::new(HubServer::start([model()]));
    let lock = bench.lock(None);
    let load = || bench.locked(&lock).model(ID, None, ModelFiles::All).map_err(|error| error.to_string());
    let folder = load().unwrap();
    for file in ["model.safetensors", "config.json"] {
        let blob = fs::canonicalize(folder.join(file)).unwrap();
        let modified = fs::metadata(&blob).unwrap().modified().unwrap();
        let own = fs::read(&blob).unwrap();
        damage(&folder.join(file));
        let error = load().unwrap_err();
        for want in [file, "its sha256 is ", "r.yaml.lock", "run `trainer prefetch r.yaml` with a network"] {
            assert!(error.contains(want), "{want:?} is not in {error:?}");
        }
        // A file with its old modification time is not hashed again.
        fs::File::options().write(true).open(&blob).unwrap().set_modified(modified).unwrap();
        assert_eq!(load().as_ref(), Ok(&folder));
        fs::write(&blob, own).unwrap();
        load().unwrap();
        damage(&folder.join(file));
        assert_eq!(bench.lock(Some(lock.clone())), lock, "prefetch repairs the cache");
        load().unwrap();
    }
}
