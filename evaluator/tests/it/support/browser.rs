//! A headless Chromium, where there is one.
#![allow(dead_code, clippy::unwrap_used, missing_docs, unreachable_pub)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// A browser that opens pages of this machine.
pub struct Browser {
    program: PathBuf,
    profile: tempfile::TempDir,
}

const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

impl Browser {
    /// Finds one in the PATH; says so if there is none.
    pub fn find() -> Option<Self> {
        let folders: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
        let programs = NAMES.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
        let found = programs.into_iter().find(|path| path.is_file());
        if found.is_none() {
            eprintln!("skipped: none of {} is in the PATH", NAMES.join(", "));
        }
        Some(Self { program: found?, profile: tempfile::tempdir().unwrap() })
    }

    /// The elements of a page as they are when its scripts have run. `fragment` is what stands behind its address.
    pub fn dom(&self, page: &Path, fragment: &str) -> String {
        let mut command = Command::new(&self.program);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]);
        command.args(["--virtual-time-budget=5000", "--no-first-run", "--disable-background-networking"]);
        command.arg(format!("--user-data-dir={}", self.profile.path().display()));
        let output = command.arg(format!("file://{}{fragment}", page.display())).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

/// The texts of all elements that begin with `opening`, such as `<td class="value"`, without what is marked in them.
pub fn texts(dom: &str, opening: &str) -> Vec<String> {
    let tag = opening.trim_start_matches('<').split([' ', '>']).next().unwrap();
    let end = format!("</{tag}>");
    let inside = |rest: &str| {
        let rest = &rest[rest.find('>').unwrap() + 1..];
        strip(&rest[..rest.find(&end).unwrap()])
    };
    dom.match_indices(opening).map(|(at, _)| inside(&dom[at..])).collect()
}

fn strip(html: &str) -> String {
    let (mut text, mut is_text) = (String::new(), true);
    for c in html.chars() {
        match c {
            '<' => is_text = false,
            '>' if !is_text => is_text = true,
            c if is_text => text.push(c),
            _ => {}
        }
    }
    text.replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", "\u{a0}").replace("&amp;", "&").trim().to_owned()
}
