//! The messages on the page of troubleshooting: the programs have them, and the commands above them print them.

use suite::{code_of, read, rust_files};

use super::fixtures;
use super::markdown::{Block, blocks};
use super::reader::Reader;

pub(super) const PAGE: &str = "docs/troubleshooting.md";

/// The parts of a message between `...`, which stands for names and numbers.
fn parts(message: &str) -> impl Iterator<Item = &str> {
    message.split("...").map(str::trim).filter(|part| !part.is_empty())
}

/// Returns the code of all crates without comments. A string literal that continues on the next line is joined.
fn sources() -> Vec<String> {
    let files = ["candle-ext", "trainer", "evaluator"].into_iter().flat_map(rust_files);
    let is_source = |path: &&std::path::PathBuf| path.components().any(|part| part.as_os_str() == "src");
    let files: Vec<_> = files.collect();
    files.iter().filter(is_source).map(|path| joined(&code_of(path))).collect()
}

fn joined(code: &str) -> String {
    let mut lines = code.split("\\\n");
    let first = lines.next().unwrap_or_default().to_owned();
    let joined = lines.fold(first, |code, line| code + line.trim_start());
    joined.replace("\\\"", "\"")
}

/// Returns the lines of the page's `text` blocks that no command above prints.
fn unprinted_messages<'a>(blocks: &'a [Block<'_>]) -> Vec<&'a str> {
    let is_printed = |i: usize| i.checked_sub(1).is_some_and(|above| blocks[above].runs());
    let of_text = blocks.iter().enumerate().filter(|(i, block)| block.language == "text" && !is_printed(*i));
    of_text.flat_map(|(_, block)| block.text.lines()).collect()
}

#[test]
fn the_programs_have_every_quoted_message() {
    let page = read(PAGE);
    let blocks = blocks(&page);
    let messages = unprinted_messages(&blocks);
    assert!(messages.len() > 20, "{} has only {} messages", PAGE, messages.len());
    let sources = sources();
    for message in messages {
        let parts: Vec<_> = parts(message.trim_start_matches("failed to ")).filter(|part| part.len() >= 8).collect();
        assert!(!parts.is_empty(), "{message}: too short to be searched for");
        let is_in = |code: &String| parts.iter().all(|part| code.contains(part));
        assert!(sources.iter().any(is_in), "{PAGE}: no source file has {message}");
    }
}

/// A block of messages after commands shows what the last command prints.
#[test]
fn the_commands_of_troubleshooting_print_their_messages() {
    let page = read(PAGE);
    let mut reader = Reader::new();
    fixtures::prepare(&reader, &page);
    let blocks = blocks(&page);
    let mut n_shown = 0;
    for (i, block) in blocks.iter().enumerate() {
        reader.follow_block(block);
        let shown = blocks.get(i + 1).filter(|next| next.language == "text");
        if let (true, Some(shown)) = (block.runs(), shown) {
            let output = &reader.followed.last().unwrap().output;
            let said = [&*output.stdout, &output.stderr].concat();
            let said = String::from_utf8_lossy(&said);
            let missing: Vec<_> = shown.text.lines().flat_map(parts).filter(|part| !said.contains(part)).collect();
            assert!(missing.is_empty(), "line {}: {missing:?} are not in {said}", shown.line);
            n_shown += 1;
        }
    }
    assert!(n_shown >= 5, "only {n_shown} commands have their messages below");
}

#[test]
fn a_message_is_split_at_its_placeholders() {
    let found: Vec<_> = parts("the file ... has ... tokens").collect();
    assert_eq!(found, ["the file", "has", "tokens"]);
    let code = "f(\"the file \\\n        is \\\"new\\\"\")";
    assert_eq!(joined(code), "f(\"the file is \"new\"\")");
}
