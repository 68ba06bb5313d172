//! Downloaded files of a model, and the number of requests for them.

use candlewick_text::hub::{Hub, HubSettings, ModelFiles};

use super::server::{HubServer, Reply, Repo, etag};
use super::{Bench, names_in};

const ID: &str = "tiny/llama";

fn sharded() -> Repo {
    let index =
        r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}"#;
    Repo::new(
        "models/tiny/llama",
        &[
            ("config.json", "{}"),
            ("tokenizer.json", "{\"model\": {}}"),
            ("model.safetensors.index.json", index),
            ("model-1.safetensors", "first shard"),
            ("model-2.safetensors", "second shard"),
            ("model-of-old.safetensors", "not in the index"),
            ("pytorch_model.bin", "pickled"),
            ("model.gguf", "quantised"),
            ("README.md", "# hello"),
        ],
    )
}

fn single() -> Repo {
    Repo::new(
        "models/tiny/llama",
        &[("config.json", "{}"), ("model.safetensors", "all weights"), ("tokenizer.json", "{}")],
    )
}

#[test]
fn the_index_decides_which_shards_come() {
    let bench = Bench::new(HubServer::start([sharded()]));
    let folder = bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(
        names_in(&folder),
        ["config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    );
    let shard = std::fs::read_to_string(folder.join("model-2.safetensors")).unwrap();
    assert_eq!(shard, "second shard");
    assert!(bench.blobs().contains(&etag("model-2.safetensors", b"second shard")));
}

#[test]
fn a_single_file_is_preferred_to_shards() {
    let bench = Bench::new(HubServer::start([sharded().with("model.safetensors", b"all weights")]));
    let folder = bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(names_in(&folder), ["config.json", "model.safetensors", "tokenizer.json"]);
}

#[test]
fn without_weights_only_small_files_come() {
    let bench = Bench::new(HubServer::start([sharded()]));
    let folder = bench.hub().model(ID, None, ModelFiles::WithoutWeights).unwrap();
    assert_eq!(names_in(&folder), ["config.json", "tokenizer.json"]);
}

#[test]
fn the_listing_is_read_page_by_page() {
    let bench = Bench::new(HubServer::start([sharded().in_pages_of(2)]));
    let folder = bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(names_in(&folder).len(), 5);
    assert_eq!(bench.server.count("GET", "/tree/"), 5);
}

#[test]
fn a_second_time_nothing_is_downloaded() {
    let bench = Bench::new(HubServer::start([single()]));
    let first = bench.hub().model(ID, None, ModelFiles::All).unwrap();
    let n_requests = bench.server.count("GET", "/resolve/") + bench.server.count("HEAD", "/resolve/");
    let second = bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(first, second);
    let n_now = bench.server.count("GET", "/resolve/") + bench.server.count("HEAD", "/resolve/");
    assert_eq!(n_now, n_requests);
}

#[test]
fn a_new_commit_brings_only_what_changed() {
    let bench = Bench::new(HubServer::start([single()]));
    bench.hub().model(ID, None, ModelFiles::All).unwrap();
    let renewed = single().with("config.json", b"{\"new\": 1}");
    bench.server.replace(renewed.clone());
    let folder = bench.hub().model(ID, None, ModelFiles::All).unwrap();
    assert!(folder.ends_with(renewed.commit()));
    assert_eq!(std::fs::read_to_string(folder.join("config.json")).unwrap(), "{\"new\": 1}");
    assert_eq!(std::fs::read_to_string(folder.join("model.safetensors")).unwrap(), "all weights");
    let asked = |path: &str| bench.server.count("GET", &format!("{}/{path}", renewed.commit()));
    assert_eq!((asked("config.json"), asked("model.safetensors"), asked("tokenizer.json")), (1, 0, 0));
    let conditional = bench.server.log().iter().filter(|r| r.header("if-none-match").is_some()).count();
    assert_eq!(conditional, 3);
}

#[test]
fn redirects_inside_the_hub_are_followed() {
    let old = Repo::new("models/old/llama", &[("config.json", "{}"), ("model.safetensors", "w")]);
    let new = Repo::new("models/new/llama", &[("config.json", "{}"), ("model.safetensors", "w")]);
    let bench = Bench::new(HubServer::start([old.moved_to("new/llama"), new]));
    let folder = bench.hub().model("old/llama", None, ModelFiles::All).unwrap();
    assert_eq!(std::fs::read_to_string(folder.join("model.safetensors")).unwrap(), "w");
}

#[test]
fn the_token_goes_to_the_hub_and_not_to_the_cdn() {
    let bench = Bench::new(HubServer::start([single().gated_by("hf_secret")]));
    let settings = HubSettings { token: Some("hf_secret".into()), ..bench.settings() };
    Hub::new(settings).unwrap().model(ID, None, ModelFiles::All).unwrap();
    let log = bench.server.log();
    let (cdn, hub): (Vec<_>, Vec<_>) = log.iter().partition(|request| request.at_cdn);
    assert!(hub.iter().all(|request| request.header("authorization") == Some("Bearer hf_secret")));
    assert!(!cdn.is_empty());
    assert!(cdn.iter().all(|request| request.header("authorization").is_none()));
}

#[test]
fn threads_that_want_one_file_download_it_once() {
    let bench = Bench::new(HubServer::start([single()]));
    let hub = bench.hub();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| hub.model(ID, None, ModelFiles::All).unwrap());
        }
        scope.spawn(|| bench.hub().model(ID, None, ModelFiles::All).unwrap());
    });
    let cdn = bench.server.log().into_iter().filter(|request| request.at_cdn).count();
    assert_eq!(cdn, 1);
}

#[test]
fn progress_ends_at_the_whole() {
    use std::sync::{Arc, Mutex};
    let bench = Bench::new(HubServer::start([single()]));
    let last = Arc::new(Mutex::new((0, 0)));
    let seen = last.clone();
    let hub = bench.hub().with_progress(Arc::new(move |progress| {
        if progress.file == "model.safetensors" {
            *seen.lock().unwrap() = (progress.done, progress.total);
        }
    }));
    hub.model(ID, None, ModelFiles::All).unwrap();
    assert_eq!(*last.lock().unwrap(), (11, 11));
}

#[test]
fn a_folder_here_wins_over_the_hub() {
    let bench = Bench::new(HubServer::start([]));
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    let path = folder.path().to_str().unwrap();
    assert_eq!(bench.hub().model(path, None, ModelFiles::All).unwrap(), folder.path());
    assert!(bench.server.log().is_empty());
}

#[test]
fn a_missing_local_path_is_not_requested_from_the_hub() {
    let bench = Bench::new(HubServer::start([single()]));
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("quickstart")).unwrap();
    let missing = folder.path().join("quikstart");
    let error = bench.hub().model(missing.to_str().unwrap(), None, ModelFiles::All).unwrap_err().to_string();
    assert!(
        error.contains("neither a folder here nor a Hub id; did you mean") && error.contains("quickstart?"),
        "{error}"
    );
    // The folder `src` exists in the working directory.
    let error = bench.hub().model("src/llama", None, ModelFiles::All).unwrap_err().to_string();
    assert!(error.contains("give a revision, such as main"), "{error}");
    assert!(bench.server.log().is_empty());
    bench.hub().model("src/llama", Some("main"), ModelFiles::All).unwrap_err();
    assert!(!bench.server.log().is_empty());
}

#[test]
fn an_adapter_brings_the_model_that_it_names() {
    let config = r#"{"base_model_name_or_path": "tiny/llama"}"#;
    let files = [("adapter_config.json", config), ("adapter_model.safetensors", "factors")];
    let bench = Bench::new(HubServer::start([single(), Repo::new("models/my/adapter", &files)]));
    let found = bench.hub().model_and_adapter("my/adapter", None).unwrap();
    assert!(found.model.join("model.safetensors").is_file());
    assert!(found.adapter.unwrap().join("adapter_model.safetensors").is_file());
    let plain = bench.hub().model_and_adapter(ID, None).unwrap();
    assert_eq!((plain.model, plain.adapter), (found.model, None));
    assert!(bench.hub().adapter(ID).unwrap_err().to_string().contains("it is no adapter"));
}

#[test]
fn an_answer_of_the_server_gives_no_secret_away() {
    let bench = Bench::new(HubServer::start([single()]));
    bench.server.answer("GET", "/api/", 99, Reply::new(401, "").header("X-Error-Message", "bad token hf_secret"));
    let settings = HubSettings { token: Some("hf_secret".into()), ..bench.settings() };
    let error = Hub::new(settings).unwrap().model(ID, None, ModelFiles::All).unwrap_err().to_string();
    assert!(error.contains("bad token (token)") && !error.contains("hf_secret"), "{error}");
}

#[test]
fn models_without_safetensors_are_explained() {
    #[track_caller]
    fn check(files: &[(&str, &str)], want: &str) {
        let bench = Bench::new(HubServer::start([Repo::new("models/tiny/llama", files)]));
        let error = bench.hub().model(ID, None, ModelFiles::All).unwrap_err().to_string();
        assert!(error.contains(want), "{want:?} is not in {error:?}");
    }
    check(&[("config.json", "{}"), ("pytorch_model.bin", "x")], "1 pickled .bin files");
    check(&[("config.json", "{}"), ("a.gguf", "x")], "1 .gguf files");
    check(&[("a.gguf", "x")], "no config.json");
    check(&[("config.json", "{}"), ("model.safetensors.index.json", "{")], "EOF");
    check(&[("config.json", "{}"), ("model.safetensors.index.json", "{}")], "no weight_map");
    check(
        &[("config.json", "{}"), ("model.safetensors.index.json", r#"{"weight_map": {"a": "../../x"}}"#)],
        "find ../../x in tiny/llama",
    );
}
