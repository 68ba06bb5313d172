//! Hostile contents of the Hub cache: links, pipes and files of other bytes.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::table::{Attack, pipe, write};

const CACHED: &[&str] = &["evaluator", "score", "--model", "tiny/base", "--text", "Say yes."];

const ABSENT: &[&str] = &["tiny/base", "config.json is not in the cache"];
const IRREGULAR: &[&str] = &["config.json", "no regular file"];
const NO_REVISION: &[&str] = &["tiny/base", "no files of revision \"main\""];

pub(crate) const ATTACKS: &[Attack] = &[
    Attack {
        name: "a locked file with other bytes in the cache",
        path: "recipe.yaml.lock",
        apply: |path| write_locked_cache(path),
        command: &["trainer", "train", "recipe.yaml", "model.name_or_path=tiny/base"],
        code: 3,
        words: &["recipe.yaml.lock", "its sha256 is ", "expected 0000", "run `trainer prefetch recipe.yaml`"],
    },
    Attack {
        name: "a locked file with other bytes in the cache, for check",
        path: "recipe.yaml.lock",
        apply: |path| write_locked_cache(path),
        command: &["trainer", "check", "recipe.yaml", "model.name_or_path=tiny/base"],
        code: 3,
        words: &["recipe.yaml.lock", "its sha256 is ", "expected 0000", "run `trainer prefetch recipe.yaml`"],
    },
    cached(
        "config.json in the cache: a link to itself",
        |model| replace_config(model, |it| symlink("config.json", it).unwrap()),
        3,
        ABSENT,
    ),
    cached(
        "config.json in the cache: a dangling link",
        |model| replace_config(model, |it| symlink("/nowhere", it).unwrap()),
        3,
        ABSENT,
    ),
    cached(
        "config.json in the cache: a link to a device without an end",
        |model| replace_config(model, device),
        6,
        IRREGULAR,
    ),
    cached("config.json in the cache: a pipe", |model| replace_config(model, pipe), 6, IRREGULAR),
    cached(
        "the revision in the cache: a link to a device without an end",
        |model| replace_revision(model, device),
        3,
        NO_REVISION,
    ),
    cached(
        "the revision in the cache: a path to another folder",
        |model| replace_revision(model, |it| write(it, "../../../models--tiny--base")),
        3,
        NO_REVISION,
    ),
];

/// Creates the row of a damaged model in the Hub cache.
const fn cached(name: &'static str, apply: fn(&Path), code: i32, words: &'static [&'static str]) -> Attack {
    Attack { name, path: "model", apply, command: CACHED, code, words }
}

/// Links a path to a device without an end.
fn device(path: &Path) {
    symlink("/dev/zero", path).unwrap();
}

fn commit() -> String {
    "1".repeat(40)
}

/// Copies the model of `folder` into the Hub cache, and returns the folder of its files there.
fn write_cache(folder: &Path) -> PathBuf {
    let cache = folder.parent().unwrap().join(".cache/huggingface/hub/models--tiny--base");
    let snapshot = cache.join("snapshots").join(commit());
    let _ = fs::remove_dir_all(&cache);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(cache.join("refs")).unwrap();
    fs::write(cache.join("refs/main"), commit()).unwrap();
    for entry in fs::read_dir(folder.join("model")).unwrap().map(Result::unwrap) {
        fs::copy(entry.path(), snapshot.join(entry.file_name())).unwrap();
    }
    snapshot
}

/// Replaces config.json in the cache.
fn replace_config(model: &Path, replace: fn(&Path)) {
    let config = write_cache(model.parent().unwrap()).join("config.json");
    fs::remove_file(&config).unwrap();
    replace(&config);
}

/// Replaces the file with the commit of `main` in the cache.
fn replace_revision(model: &Path, replace: fn(&Path)) {
    let snapshot = write_cache(model.parent().unwrap());
    let revision = snapshot.ancestors().nth(2).unwrap().join("refs/main");
    fs::remove_file(&revision).unwrap();
    replace(&revision);
}

/// Copies the model into the Hub cache, and writes a lock file with other hashes.
fn write_locked_cache(lock: &Path) {
    let snapshot = write_cache(lock.parent().unwrap());
    let file = |entry: fs::DirEntry| {
        let (name, size) = (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len());
        json!({"path": name, "size": size, "sha256": "0".repeat(64)})
    };
    let files: Vec<_> = fs::read_dir(snapshot).unwrap().map(Result::unwrap).map(file).collect();
    let repository =
        json!({"type": "model", "id": "tiny/base", "revision": "main", "commit": commit(), "files": files});
    write(lock, json!({"version": 1, "endpoint": "http://hub", "repositories": [repository]}).to_string());
}
