//! The recipes inside the program.

use std::path::{Path, PathBuf};

use candlewick_text::suggestion::nearest;

/// A recipe inside the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShippedRecipe {
    /// Its name: the path in the folder `recipes`, without `.yaml`.
    pub name: &'static str,
    /// The YAML text.
    pub text: &'static str,
}

/// The hardware of a recipe and its memory, from its comments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatedMemory {
    /// The number of ranks.
    pub n_ranks: usize,
    /// The device of each rank, as `trainer estimate --device` names it.
    pub device: &'static str,
    /// The memory of each rank's device, such as `61.2 GiB`.
    pub device_memory: &'static str,
    /// The host RAM of each rank of a GPU run that offloads to the host.
    pub host_ram: Option<&'static str>,
}

macro_rules! shipped {
    ($($name:literal)*) => {
        [$(ShippedRecipe { name: $name, text: include_str!(concat!("../../../recipes/", $name, ".yaml")) }),*]
    };
}

/// The folder in the paths of shipped recipes. No such folder exists.
const FOLDER: &str = "<shipped>";

/// All recipes, in the order of `trainer recipes ls`. Those in the folder `base` hold keys that several recipes share.
pub static SHIPPED: &[ShippedRecipe] = &shipped![
    "quickstart"
    "smollm2-135m-sft"
    "smollm2-135m-lora"
    "smollm2-135m-pretrain"
    "llama-3.2-1b-sft"
    "llama-3.2-1b-lora"
    "llama-3.2-3b-sft"
    "llama-3.2-3b-lora"
    "llama-3.1-8b-sft"
    "llama-3.1-8b-lora"
    "llama-3.1-8b-pretrain"
    "llama-3.1-8b-long-1gpu"
    "llama-3.1-8b-long-h200"
    "llama-3.1-8b-long-8gpu"
    "llama-3.1-8b-long-32gpu"
    "llama-3.3-70b-sft"
    "llama-3.3-70b-lora"
    "qwen2.5-coder-1.5b-lora"
    "qwen2.5-7b-sft"
    "qwen2.5-7b-lora"
    "qwen3-0.6b-sft"
    "qwen3-0.6b-lora"
    "qwen3-1.7b-sft"
    "qwen3-1.7b-lora"
    "qwen3-4b-sft"
    "qwen3-4b-lora"
    "qwen3-8b-sft"
    "qwen3-8b-fp8-sft"
    "qwen3-8b-lora"
    "qwen3-14b-sft"
    "qwen3-14b-lora"
    "qwen3-32b-sft"
    "qwen3-32b-lora"
    "qwen3-32b-workstation"
    "qwen3-30b-a3b-sft"
    "qwen3-30b-a3b-lora"
    "mixtral-8x7b-sft"
    "mixtral-8x7b-lora"
    "base/chat"
    "base/full"
    "base/lora"
    "base/text"
    "base/long"
];

/// Finds a shipped recipe by its name, with or without `.yaml`.
pub fn find(name: &str) -> Option<&'static ShippedRecipe> {
    let name = name.strip_suffix(".yaml").unwrap_or(name);
    SHIPPED.iter().find(|recipe| recipe.name == name)
}

/// Finds the shipped recipe that has this path, as [`ShippedRecipe::path`] returns it.
pub(crate) fn at(path: &Path) -> Option<&'static ShippedRecipe> {
    path.strip_prefix(FOLDER).ok()?.to_str().and_then(find)
}

/// Returns the name of the shipped recipe that is most similar to `name`, if one is similar.
pub fn nearest_name(name: &str) -> Option<&'static str> {
    nearest(name.strip_suffix(".yaml").unwrap_or(name), SHIPPED.iter().map(|recipe| recipe.name))
}

impl ShippedRecipe {
    /// Returns true for a recipe that only others include.
    pub fn is_base(&self) -> bool {
        self.name.starts_with("base/")
    }

    /// Returns the path of the recipe in messages and in `run.json`.
    pub fn path(&self) -> PathBuf {
        Path::new(FOLDER).join(format!("{}.yaml", self.name))
    }

    /// Returns the recipe that this one includes, if it has the key `base`.
    pub fn base(&self) -> Option<&'static ShippedRecipe> {
        let name = self.text.lines().find_map(|line| line.strip_prefix("base: "))?;
        at(&self.path().with_file_name(name))
    }

    /// Returns the first sentence of the recipe's comment.
    pub fn description(&self) -> String {
        let paragraph: Vec<&str> = self.comment().take_while(|line| !line.is_empty()).collect();
        let text = paragraph.join(" ");
        text.split_once(". ").map_or(text.as_str(), |(sentence, _)| sentence).trim_end_matches('.').to_owned()
    }

    /// Returns the hardware and memory that the recipe's comment states.
    ///
    /// The lines are `Device: 8 x h100-80g` and `Memory of each: 61.2 GiB`, or `Memory of each: 61.2 GiB and 90.1 GiB of host RAM`; the
    /// memory is that of one rank.
    pub fn stated_memory(&self) -> Option<StatedMemory> {
        let value_of = |key: &str| self.comment().find_map(|line| line.strip_prefix(key));
        let (n_ranks, device) = value_of("Device: ")?.split_once(" x ")?;
        let memory = value_of("Memory of each: ")?;
        let (device_memory, host_ram) = match memory.split_once(" and ") {
            Some((device_memory, host)) => (device_memory, host.strip_suffix(" of host RAM")),
            None => (memory, None),
        };
        Some(StatedMemory { n_ranks: n_ranks.parse().ok()?, device, device_memory, host_ram })
    }

    /// Returns the lines of the comment at the start, without `# `. The schema's line is left out.
    fn comment(&self) -> impl Iterator<Item = &'static str> + use<> {
        let comment = self.text.lines().take_while(|line| line.starts_with('#')).skip(2);
        comment.map(|line| line.trim_start_matches('#').trim_start())
    }
}
