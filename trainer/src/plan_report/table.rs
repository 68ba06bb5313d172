//! The plan as a table for the user: key, value and origin.

use crate::data::TrainSteps;
use crate::plan::{Plan, ResolvedSetting};
use crate::recipe::Origin;

/// The settings that a table shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettingsFilter {
    /// All settings.
    All,
    /// Settings from the recipe, an argument or `memory: auto`.
    Set,
}

impl Plan {
    /// Writes the table of settings, the derived numbers and the notes.
    pub fn table(&self, shown: SettingsFilter) -> String {
        self.table_with_steps(shown, None)
    }

    /// Writes the table like [`Plan::table`], with the steps of the data if they are counted.
    pub fn table_with_steps(&self, shown: SettingsFilter, counted: Option<&TrainSteps>) -> String {
        let is_set = |setting: &ResolvedSetting| !matches!(setting.origin, Origin::Default | Origin::Derived);
        let settings: Vec<&ResolvedSetting> =
            self.settings.iter().filter(|it| shown == SettingsFilter::All || is_set(it)).collect();
        let width = |of: fn(&ResolvedSetting) -> usize| settings.iter().map(|setting| of(setting)).max().unwrap_or(0);
        let keys = width(|s| s.key.chars().count());
        let values = width(|s| s.shown().chars().count()).min(40);
        let mut text = format!("plan of {}\n", self.recipe.display());
        for setting in &settings {
            text += &format!("  {:keys$}  {:values$}  {}\n", setting.key, setting.shown(), setting.origin);
        }
        let n_hidden = self.settings.len() - settings.len();
        if n_hidden > 0 {
            text += &format!("  and {n_hidden} settings with their defaults: --all shows them\n");
        }
        let steps: Vec<String> = counted.map(|stream| self.steps(stream)).unwrap_or_default();
        let facts = self.facts().into_iter().filter(|(name, _)| steps.is_empty() || *name != "steps");
        facts.for_each(|(name, fact)| text += &format!("{name}: {fact}\n"));
        steps.iter().for_each(|line| text += &format!("{line}\n"));
        self.notes.iter().for_each(|note| text += &format!("note: {note}\n"));
        text
    }
}
