//! A headless Chromium for tests, if one is installed.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Headless browser that opens local pages.
#[derive(Debug)]
pub struct Browser {
    program: PathBuf,
    profile: tempfile::TempDir,
}

/// Page after its scripts have run.
#[derive(Clone, Debug)]
pub struct OpenedPage {
    /// Elements of the page, as HTML.
    pub dom: String,
    /// Messages of the console, errors included.
    pub console: Vec<String>,
}

const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
/// Flags for a browser without a window, without requests of its own, and as root in a container.
const FLAGS: [&str; 13] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
    "--dump-dom",
];

impl Browser {
    /// Finds a browser in the PATH. If there is none, prints a note that the test harness does not capture.
    pub fn find() -> Option<Self> {
        let folders: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
        let programs = NAMES.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
        let found = programs.into_iter().find(|path| path.is_file());
        if found.is_none() {
            let _ = writeln!(io::stderr(), "skipped: none of {} is in the PATH", NAMES.join(", "));
        }
        Some(Self { program: found?, profile: tempfile::tempdir().ok()? })
    }

    /// Opens a page and waits for its scripts. `fragment` is the URL fragment, such as `#task=a`.
    ///
    /// # Panics
    /// If the browser cannot be started, or fails.
    pub fn open(&self, page: &Path, fragment: &str) -> OpenedPage {
        let mut command = Command::new(&self.program);
        command.args(FLAGS).arg(format!("--user-data-dir={}", self.profile.path().display()));
        let Output { status, stdout, stderr } =
            command.arg(format!("file://{}{fragment}", page.display())).output().expect("the browser starts");
        let log = String::from_utf8_lossy(&stderr);
        assert!(status.success(), "{log}");
        let message = |line: &str| Some(line.split_once(":CONSOLE")?.1.to_owned());
        OpenedPage {
            dom: String::from_utf8_lossy(&stdout).into_owned(),
            console: log.lines().filter_map(message).collect(),
        }
    }

    /// Returns the page's elements after its scripts have run.
    ///
    /// # Panics
    /// As [`Self::open`].
    pub fn dom(&self, page: &Path, fragment: &str) -> String {
        self.open(page, fragment).dom
    }
}

/// Returns the texts of all elements that start with `opening`, such as `<td class="value"`, without nested tags.
///
/// # Panics
/// If an element has no end.
pub fn texts(dom: &str, opening: &str) -> Vec<String> {
    let tag = opening.trim_start_matches('<').split([' ', '>']).next().unwrap_or_default();
    let end = format!("</{tag}>");
    let inside = |rest: &str| {
        let (_, rest) = rest.split_once('>').expect("a start tag ends");
        strip(rest.split_once(&end).expect("an element ends").0)
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Without this test, a browser that logs nothing would pass every test of the console.
    #[test]
    fn an_error_of_a_script_is_in_the_console() {
        let Some(browser) = Browser::find() else { return };
        let folder = tempfile::tempdir().unwrap();
        let open = |script: &str| {
            let page = folder.path().join("page.html");
            std::fs::write(&page, format!("<!doctype html><p></p><script>{script}</script>")).unwrap();
            browser.open(&page, "")
        };
        let page = open("document.querySelector('p').textContent = 'a < b';");
        assert_eq!((texts(&page.dom, "<p"), page.console), (vec!["a < b".to_owned()], Vec::new()));
        let console = open("missing();").console;
        assert!(console.len() == 1 && console[0].contains("missing is not defined"), "{console:?}");
    }
}
