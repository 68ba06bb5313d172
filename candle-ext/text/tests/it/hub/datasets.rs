//! Selection of a split's files, through the Hub and from the cache.

use candlewick_text::hub::{DatasetRequest, Hub, HubSettings};
use candlewick_text::source::RowSource;

use super::Bench;
use super::server::{HubServer, Reply, Repo};

fn rows(n: usize, tag: &str) -> String {
    (0..n).map(|i| format!("{{\"text\": \"{tag} {i}\"}}\n")).collect()
}

fn by_name() -> Repo {
    let (train, test) = (rows(4, "train"), rows(2, "test"));
    let card = "---\nlicense: mit\n---\n# no word on files";
    Repo::new(
        "datasets/tiny/rows",
        &[("README.md", card), ("train.jsonl", &train), ("test.jsonl", &test), ("LICENSE.txt", "MIT")],
    )
}

fn open(hub: &Hub, spec: &str) -> Result<Box<dyn RowSource>, String> {
    let request = DatasetRequest::parse(spec, "train").map_err(|e| e.to_string())?;
    hub.dataset(&request).map_err(|e| e.to_string())
}

fn texts(source: &dyn RowSource) -> Vec<String> {
    (0..source.len()).map(|i| source.row(i).unwrap()["text"].as_str().unwrap().to_owned()).collect()
}

#[track_caller]
fn refused(hub: &Hub, spec: &str, want: &str) {
    let error = open(hub, spec).err().unwrap();
    assert!(error.contains(want), "{want:?} is not in {error:?}");
}

#[test]
fn a_split_by_its_files_name() {
    let bench = Bench::new(HubServer::start([by_name()]));
    let hub = bench.hub();
    assert_eq!(open(&hub, "tiny/rows").unwrap().len(), 4);
    assert_eq!(texts(&*open(&hub, "tiny/rows:test").unwrap()), ["test 0", "test 1"]);
    assert_eq!(texts(&*open(&hub, "tiny/rows:train[1:3]").unwrap()), ["train 1", "train 2"]);
    assert_eq!(open(&hub, "tiny/rows:train[:50%]+test").unwrap().len(), 4);
    assert_eq!(bench.server.count("GET", "LICENSE.txt"), 0);
    refused(&hub, "tiny/rows:train[:9]", "only 4");
    refused(&hub, "tiny/rows:valid", "it has no split \"valid\"; there are: test, train");
    refused(&hub, "tiny/row", "the Hub has none of that name");
}

#[test]
fn only_the_splits_own_files_are_downloaded() {
    let bench = Bench::new(HubServer::start([by_name()]));
    open(&bench.hub(), "tiny/rows:test").unwrap();
    assert_eq!(bench.server.count("GET", "train.jsonl"), 0);
}

#[test]
fn the_readme_names_the_files_of_a_configuration() {
    let card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/*.jsonl\n- config_name: extra\n  data_files: extra/*.jsonl\n---\n";
    let (main, extra) = (rows(3, "main"), rows(1, "extra"));
    let repo =
        Repo::new("datasets/tiny/rows", &[("README.md", card), ("main/a b.jsonl", &main), ("extra/b.jsonl", &extra)]);
    let bench = Bench::new(HubServer::start([repo]));
    let mut request = DatasetRequest::parse("tiny/rows", "train").unwrap();
    let error = bench.hub().dataset(&request).err().unwrap().to_string();
    assert!(error.contains("name one of: main, extra"), "{error}");
    request.config = Some("main".into());
    assert_eq!(bench.hub().dataset(&request).unwrap().len(), 3);
    request.config = Some("extra".into());
    assert_eq!(texts(&*bench.hub().dataset(&request).unwrap()), ["extra 0"]);
}

#[test]
fn shards_come_in_order_and_a_split_may_have_another_name() {
    let names = ["data/train_sft-00001-of-00002.jsonl", "data/train_sft-00000-of-00002.jsonl"];
    let (second, first) = (rows(1, "second"), rows(1, "first"));
    let repo = Repo::new("datasets/tiny/chat", &[(names[0], &second), (names[1], &first)]);
    let bench = Bench::new(HubServer::start([repo]));
    let mut request = DatasetRequest::parse("tiny/chat:train[:2]", "train").unwrap();
    request.split_mapping = vec![("train".into(), "train_sft".into())];
    assert_eq!(texts(&*bench.hub().dataset(&request).unwrap()), ["first 0", "second 0"]);
}

#[test]
fn files_named_outright_win() {
    let bench = Bench::new(HubServer::start([by_name()]));
    let mut request = DatasetRequest::parse("tiny/rows", "train").unwrap();
    request.data_files = vec![(None, "te*.jsonl".into())];
    assert_eq!(texts(&*bench.hub().dataset(&request).unwrap()), ["test 0", "test 1"]);
}

#[test]
fn a_loaders_name_stands_for_the_files_of_this_machine() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    for (name, n_rows) in [("a.jsonl", 2), ("b.jsonl", 1), ("c.jsonl", 3)] {
        std::fs::write(path(name), rows(n_rows, name)).unwrap();
    }
    let bench = Bench::new(HubServer::start([]));
    let ask = |spec: &str, files: &[(Option<&str>, String)]| {
        let mut request = DatasetRequest::parse(spec, "train").unwrap();
        request.data_files = files.iter().map(|(split, file)| (split.map(str::to_owned), file.clone())).collect();
        bench.hub().dataset(&request).map(|source| texts(&*source)).map_err(|error| error.to_string())
    };
    let any = [(None, path("b.jsonl")), (None, path("[a]*.jsonl"))];
    assert_eq!(ask("json", &any).unwrap(), ["b.jsonl 0", "a.jsonl 0", "a.jsonl 1"]);
    let by_split = [(Some("train"), path("a.jsonl")), (Some("test"), path("c.jsonl"))];
    assert_eq!(ask("json", &by_split).unwrap().len(), 2);
    assert_eq!(ask("json:test[1:]", &by_split).unwrap(), ["c.jsonl 1", "c.jsonl 2"]);
    let error = ask("json:dev", &by_split).unwrap_err();
    assert!(error.contains("no files of the split \"dev\"; it has train, test"), "{error}");
    let error = ask(&path("a.jsonl"), &any).unwrap_err();
    assert!(error.contains("data_files name files of a folder"), "{error}");
    assert!(bench.server.log().is_empty());
}

#[test]
fn offline_opens_what_was_opened_before() {
    let bench = Bench::new(HubServer::start([by_name()]));
    refused(&bench.offline(), "tiny/rows", "hf download tiny/rows --repo-type dataset");
    open(&bench.hub(), "tiny/rows:test").unwrap();
    let n_requests = bench.server.log().len();
    assert_eq!(open(&bench.offline(), "tiny/rows:test").unwrap().len(), 2);
    refused(&bench.offline(), "tiny/rows:train", "offline");
    assert_eq!(bench.server.log().len(), n_requests);
}

#[test]
fn offline_a_half_fetched_commit_is_not_whole() {
    let (first, second) = (rows(1, "a"), rows(1, "b"));
    let repo = Repo::new("datasets/tiny/two", &[("a.jsonl", &first), ("b.jsonl", &second)]);
    let mut request = DatasetRequest::parse("tiny/two", "train").unwrap();
    request.revision = Some(repo.commit().to_owned());
    let bench = Bench::new(HubServer::start([repo]));
    bench.server.answer("HEAD", "b.jsonl", 1, Reply::new(403, ""));
    assert!(bench.hub().dataset(&request).is_err());
    let error = bench.offline().dataset(&request).err().unwrap().to_string();
    assert!(error.contains("offline: b.jsonl is not in the cache; fetch it once"), "{error}");
    assert_eq!(bench.hub().dataset(&request).unwrap().len(), 2);
    assert_eq!(bench.offline().dataset(&request).unwrap().len(), 2);
}

#[test]
fn offline_a_cache_that_other_tools_filled_is_used() {
    let bench = Bench::new(HubServer::start([by_name()]));
    open(&bench.hub(), "tiny/rows:test").unwrap();
    std::fs::remove_dir_all(bench.cache.path().join("datasets--tiny--rows/.listings")).unwrap();
    assert_eq!(open(&bench.offline(), "tiny/rows:test").unwrap().len(), 2);
}

#[test]
fn a_path_that_exists_wins_and_a_path_that_does_not_is_no_id() {
    let bench = Bench::new(HubServer::start([by_name()]));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("own.jsonl");
    std::fs::write(&file, rows(3, "own")).unwrap();
    let spec = format!("{}:train[1:]", file.display());
    assert_eq!(texts(&*open(&bench.hub(), &spec).unwrap()), ["own 1", "own 2"]);
    refused(&bench.hub(), &folder.path().join("owm.jsonl").display().to_string(), "own.jsonl?");
    refused(&bench.hub(), "data/nothing.jsonl", "no folder data");
    assert!(bench.server.log().is_empty());
}

#[test]
fn an_empty_file_is_reported() {
    let repo = Repo::new("datasets/tiny/none", &[("train.jsonl", "\n\n")]);
    let bench = Bench::new(HubServer::start([repo]));
    refused(&bench.hub(), "tiny/none", "there are no rows in it");
}

#[test]
fn out_of_reach_says_that_no_file_has_the_name() {
    let bench = Bench::new(HubServer::start([by_name()]));
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let settings = HubSettings { endpoint: format!("http://{port}"), ..bench.settings() };
    refused(&Hub::new(settings).unwrap(), "tiny/rows", "no file or folder here has the name tiny/rows");
}
