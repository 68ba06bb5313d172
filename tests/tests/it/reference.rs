//! The generated pages of docs/reference: the commands of the programs and the keys of recipes.

use candlewick_command_line::reference;
use clap::CommandFactory;
use suite::{read, root};

/// The pages by their names, and their contents.
fn pages() -> [(&'static str, String); 4] {
    let program = |name: &'static str, command| {
        let help = format!("`{name} --help` prints it in the terminal, and `{name} man DIR` writes man pages.");
        (name, page(&format!("The program `{name}`"), &help, &reference(command)))
    };
    let explain = "`trainer config explain KEY` explains a key in the terminal. `N` is the index of an item of a list.";
    let keys = page("Recipe keys", explain, &trainer::recipe::key_reference());
    [
        program("trainer", trainer::cli::command()),
        program("evaluator", evaluator::cli::command()),
        program("launch", candlewick_launch::cli::Cli::command()),
        ("recipe-keys", keys),
    ]
}

fn page(title: &str, help: &str, contents: &str) -> String {
    format!("# {title}\n\nThis page is generated from the code. {help}\n{contents}")
}

/// To write the pages after a change of an argument or a key: `CANDLEWICK_UPDATE_REFERENCE=1 cargo test --workspace --test it reference`.
#[test]
fn the_reference_pages_are_current() {
    for (name, current) in pages() {
        let path = format!("docs/reference/{name}.md");
        if std::env::var_os("CANDLEWICK_UPDATE_REFERENCE").is_some() {
            std::fs::create_dir_all(root().join("docs/reference")).unwrap();
            std::fs::write(root().join(&path), &current).unwrap();
        }
        let remedy = "set CANDLEWICK_UPDATE_REFERENCE=1 and run this test";
        assert!(read(&path) == current, "{path} is not current: {remedy}");
    }
}

#[test]
fn the_reference_has_every_key_of_the_schema() {
    let page = read("docs/reference/recipe-keys.md");
    for doc in trainer::recipe::key_docs() {
        assert!(page.contains(&format!("| `{}` | ", doc.path)), "{} is missing", doc.path);
    }
}
