//! The plan for the user: its settings with their origins, and derived numbers such as parameters and steps.

mod facts;
mod table;

pub use table::SettingsFilter;
