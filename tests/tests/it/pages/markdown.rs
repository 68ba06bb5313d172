//! Fenced blocks of a Markdown page, the comments above them, and the commands in them.

/// A fenced block of a page.
#[derive(Debug)]
pub(super) struct Block<'a> {
    /// The line of the opening fence, from 1.
    pub(super) line: usize,
    pub(super) language: &'a str,
    pub(super) text: String,
    pub(super) marker: Marker<'a>,
}

/// The HTML comment in the line above a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marker<'a> {
    None,
    /// `<!-- not run: REASON -->`
    NotRun(&'a str),
    /// `<!-- exit code N -->`: the exit code of the block's last command. The others succeed.
    ExitCode(i32),
}

impl<'a> Marker<'a> {
    /// Reads the line above a fence.
    ///
    /// # Panics
    /// If it is a comment of another kind, such as a marker with a spelling mistake.
    fn read(line: &'a str) -> Self {
        let Some(comment) = line.strip_prefix("<!-- ").and_then(|rest| rest.strip_suffix(" -->")) else {
            assert!(!line.starts_with("<!--"), "{line} is no marker");
            return Self::None;
        };
        match (comment.strip_prefix("not run: "), comment.strip_prefix("exit code ")) {
            (Some(reason), _) => Self::NotRun(reason),
            (None, Some(code)) => Self::ExitCode(code.parse().unwrap()),
            (None, None) => panic!("{line} is no marker"),
        }
    }
}

impl Block<'_> {
    /// Returns true if the block has commands.
    pub(super) fn has_commands(&self) -> bool {
        ["sh", "bash", "console"].contains(&self.language)
    }

    /// Returns true if the tests run the block's commands.
    pub(super) fn runs(&self) -> bool {
        self.has_commands() && !matches!(self.marker, Marker::NotRun(_))
    }

    /// Returns the commands: the whole text of a script, or the lines of a console after `$ `. A line of a console that ends
    /// with a backslash continues on the next.
    pub(super) fn commands(&self) -> Vec<String> {
        if self.language != "console" {
            return vec![self.text.clone()];
        }
        let joined = self.text.replace("\\\n", " ");
        joined.lines().filter_map(|line| line.strip_prefix("$ ")).map(str::to_owned).collect()
    }

    /// Returns the file name in the first line of a recipe or task file, which is a comment.
    pub(super) fn file_name(&self) -> Option<&str> {
        let name = self.text.lines().next()?.strip_prefix("# ")?;
        (name.ends_with(".yaml") && !name.contains(' ')).then_some(name)
    }
}

/// Returns the fenced blocks of a page, also those in list items.
pub(super) fn blocks(page: &str) -> Vec<Block<'_>> {
    let mut blocks = Vec::new();
    let mut above = "";
    let mut lines = page.lines().enumerate();
    while let Some((i, line)) = lines.next() {
        let indent = line.len() - line.trim_start().len();
        if let Some(language) = line[indent..].strip_prefix("```") {
            let inside = lines.by_ref().map(|(_, line)| line).take_while(|line| line.trim_start() != "```");
            let text = inside.map(|line| line.get(indent..).unwrap_or_default().to_owned() + "\n").collect();
            blocks.push(Block { line: i + 1, language, text, marker: Marker::read(above.trim_start()) });
        }
        above = line;
    }
    blocks
}

#[test]
fn blocks_have_their_markers_and_commands() {
    let page = "<!-- exit code 3 -->\n```console\n$ a \\\n    b\noutput\n$ c\n```\n\n* item\n\n  ```sh\n  d\n    e\n  ```\n\
        \n<!-- not run: it needs a GPU -->\n```sh\nf\n```\n```yaml\n# g.yaml\nkey: 1\n```\n";
    let blocks = blocks(page);
    let markers: Vec<_> = blocks.iter().map(|block| block.marker).collect();
    assert_eq!(markers, [Marker::ExitCode(3), Marker::None, Marker::NotRun("it needs a GPU"), Marker::None]);
    assert_eq!(blocks[0].commands(), ["a      b", "c"]);
    assert_eq!(blocks[1].commands(), ["d\n  e\n"]);
    assert_eq!((blocks[1].line, blocks[3].file_name(), blocks[3].has_commands()), (11, Some("g.yaml"), false));
}

#[test]
#[should_panic(expected = "is no marker")]
fn a_misspelled_marker_is_refused() {
    blocks("<!-- not ran: it needs a GPU -->\n```sh\nf\n```\n");
}
