//! The files of one crate and the files that each depends on.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use suite::{read, root};

use super::source::{Import, SourceFile};

/// The modules of a crate, the root first.
pub(crate) struct CrateFiles(Vec<Module>);

struct Module {
    file: PathBuf,
    parent: usize,
    children: BTreeMap<String, usize>,
    source: SourceFile,
}

/// The meaning of a path: a module, or an item of one.
#[derive(Clone, Copy)]
enum Named {
    Module(usize),
    Item(usize),
}

/// The longest chain of re-exports that is followed.
const MAX_DEPTH: usize = 16;

/// Modules of a folder that depend on each other in a circle.
pub(crate) struct Cycle {
    /// Paths, in the order of their names.
    pub(crate) modules: Vec<String>,
    /// The imports that close it, a line each.
    pub(crate) imports: String,
}

/// The text of a file, if there is one.
type Read<'a> = &'a dyn Fn(&Path) -> Option<String>;

impl CrateFiles {
    /// Reads the files that `mod` declarations reach from a crate's root in the workspace, tests apart.
    pub(crate) fn of(root_file: &Path) -> Self {
        Self::read(root_file.to_owned(), &|path| root().join(path).is_file().then(|| read(path)))
    }

    /// Reads the files of a crate by `read`.
    pub(crate) fn read(root_file: PathBuf, read: Read) -> Self {
        let mut files = Self(Vec::new());
        let text = read(&root_file).unwrap_or_else(|| panic!("no file {}", root_file.display()));
        files.add(root_file, &text, 0, read);
        files
    }

    fn add(&mut self, file: PathBuf, text: &str, parent: usize, read: Read) -> usize {
        let source = SourceFile::parse(text);
        let names = source.children.clone();
        let folder = match file.file_name().and_then(|name| name.to_str()) {
            Some("lib.rs" | "main.rs" | "mod.rs") => file.parent().expect("a file is in a folder").to_owned(),
            _ => file.with_extension(""),
        };
        let own = self.0.len();
        self.0.push(Module { file, parent, children: BTreeMap::new(), source });
        for name in names {
            let files = [folder.join(format!("{name}.rs")), folder.join(&name).join("mod.rs")];
            let found = files.into_iter().find_map(|file| Some((read(&file)?, file)));
            let (text, file) = found.unwrap_or_else(|| panic!("no file of module {name} in {}", folder.display()));
            let child = self.add(file, &text, own, read);
            self.0[own].children.insert(name, child);
        }
        own
    }

    /// Returns the largest groups of files that depend on each other in a circle.
    pub(crate) fn file_cycles(&self) -> Vec<Cycle> {
        self.cycles(|files| (PathBuf::new(), files.map(|file| file.display().to_string())))
    }

    /// Returns the largest groups of modules of a folder that depend on each other in a circle. A module is a file, with the
    /// folder of its child modules, or a folder.
    pub(crate) fn folder_cycles(&self) -> Vec<Cycle> {
        self.cycles(siblings)
    }

    /// Returns the circles of the modules in which `modules_of` puts the two files of an import, and of their folder.
    fn cycles(&self, modules_of: fn([&PathBuf; 2]) -> (PathBuf, [String; 2])) -> Vec<Cycle> {
        let mut folders: BTreeMap<PathBuf, Edges> = BTreeMap::new();
        for from in 0..self.0.len() {
            for (to, path) in self.dependencies(from) {
                let files = [from, to].map(|at| &self.0[at].file);
                let import = format!("  {} uses {} ({path})\n", files[0].display(), files[1].display());
                let (folder, [from, to]) = modules_of(files);
                folders.entry(folder).or_default().entry(from).or_default().entry(to).or_default().push_str(&import);
            }
        }
        let mut found = Vec::new();
        for (folder, edges) in &folders {
            found.extend(rings(edges).iter().map(|ring| cycle(folder, ring, edges)));
        }
        found
    }

    /// Returns the other files that a file depends on, each with a path that names it.
    fn dependencies(&self, from: usize) -> BTreeMap<usize, String> {
        let source = &self.0[from].source;
        let counts = |import: &&Import| !import.is_reexport || source.words.contains(&import.name);
        let imported = source.imports.iter().filter(counts).map(|import| &import.path);
        let items = imported.chain(&source.paths).flat_map(|path| {
            self.named(from, path, MAX_DEPTH).into_iter().filter_map(move |named| match named {
                Named::Item(to) if to != from => Some((to, path.join("::"))),
                _ => None,
            })
        });
        items.collect()
    }

    /// Returns the item of this crate that a path in module `from` names; `None` for other crates.
    fn named(&self, from: usize, path: &[String], depth: usize) -> Vec<Named> {
        match path[0].as_str() {
            _ if depth == 0 => Vec::new(),
            "crate" => self.below(0, &path[1..], depth),
            "self" => self.below(from, &path[1..], depth),
            "super" => {
                let n_up = path.iter().take_while(|segment| *segment == "super").count();
                let module = (0..n_up).fold(from, |module, _| self.0[module].parent);
                self.below(module, &path[n_up..], depth)
            }
            _ if self.is_in_scope(from, &path[0]) => self.below(from, path, depth),
            _ => Vec::new(),
        }
    }

    fn is_in_scope(&self, module: usize, name: &String) -> bool {
        let Module { children, source, .. } = &self.0[module];
        children.contains_key(name)
            || source.imports.iter().any(|import| import.name == *name && import.path != [name.as_str()])
    }

    /// Resolves `path` below `module`: child modules take precedence over imports, and imports over the module's items.
    fn below(&self, module: usize, path: &[String], depth: usize) -> Vec<Named> {
        let Some((first, rest)) = path.split_first() else { return vec![Named::Module(module)] };
        let Module { children, source, .. } = &self.0[module];
        if let Some(child) = children.get(first) {
            return self.below(*child, rest, depth);
        }
        if self.is_in_scope(module, first) {
            let imports = source.imports.iter().filter(|import| import.name == *first);
            let targets = imports.flat_map(|import| self.named(module, &import.path, depth.saturating_sub(1)));
            return targets.flat_map(|named| self.member(named, rest, depth)).collect();
        }
        let globs = source.imports.iter().filter(|import| import.name == "*" && !source.definitions.contains(first));
        let mut through_glob = globs
            .flat_map(|glob| self.named(module, &glob.path, depth.saturating_sub(1)))
            .filter_map(|named| match named {
                Named::Module(other) if self.defines(other, first) => {
                    Some(self.below(other, path, depth.saturating_sub(1)))
                }
                _ => None,
            });
        through_glob.next().unwrap_or_else(|| vec![Named::Item(module)])
    }

    fn member(&self, named: Named, rest: &[String], depth: usize) -> Vec<Named> {
        match named {
            Named::Module(module) => self.below(module, rest, depth.saturating_sub(1)),
            Named::Item(_) => vec![named],
        }
    }

    fn defines(&self, module: usize, name: &String) -> bool {
        self.0[module].source.definitions.contains(name) || self.is_in_scope(module, name)
    }
}

/// The imports of each module of a folder, by the module that they name.
type Edges = BTreeMap<String, BTreeMap<String, String>>;

/// Returns the deepest folder of two files, and their modules in it.
fn siblings([from, to]: [&PathBuf; 2]) -> (PathBuf, [String; 2]) {
    let parts =
        |file: &PathBuf| file.with_extension("").iter().map(|part| part.display().to_string()).collect::<Vec<_>>();
    let [from, to] = [from, to].map(parts);
    let n_shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    // A file and the folder of its child modules differ by the part after the folder's name.
    let module = |parts: &[String]| parts.get(n_shared).map_or("mod", String::as_str).to_owned();
    (from[..n_shared].iter().collect(), [module(&from), module(&to)])
}

/// Returns the largest groups of modules that reach each other.
fn rings(edges: &Edges) -> BTreeSet<Vec<String>> {
    let reached: BTreeMap<&String, BTreeSet<String>> =
        edges.keys().map(|from| (from, reachable(edges, from))).collect();
    let reaches = |from: &String, to: &String| reached.get(from).is_some_and(|reached| reached.contains(to));
    let ring_of =
        |(from, to): (&&String, &BTreeSet<String>)| to.iter().filter(|to| reaches(to, from)).cloned().collect();
    reached.iter().map(ring_of).filter(|ring: &Vec<String>| !ring.is_empty()).collect()
}

fn cycle(folder: &Path, ring: &[String], edges: &Edges) -> Cycle {
    let between =
        |from: &String| edges[from].iter().filter(|(to, _)| ring.contains(to)).map(|(_, imports)| imports.as_str());
    let imports = ring.iter().flat_map(between).collect();
    Cycle { modules: ring.iter().map(|module| folder.join(module).display().to_string()).collect(), imports }
}

fn reachable(edges: &Edges, from: &String) -> BTreeSet<String> {
    let (mut reached, mut waiting) = (BTreeSet::new(), vec![from]);
    while let Some(at) = waiting.pop() {
        let targets = edges.get(at).into_iter().flat_map(BTreeMap::keys);
        waiting.extend(targets.filter(|to| reached.insert((*to).clone())));
    }
    reached
}
