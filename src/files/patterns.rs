//! Patterns of paths in the settings `files.include` and `files.exclude`.

use std::path::Path;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

/// Patterns of paths. `*` and `?` match within a name, `**` matches folders.
#[derive(Clone, Debug, Default)]
pub struct Patterns {
    set: GlobSet,
}

impl Patterns {
    /// Reads the patterns; one that does not begin with `/` is relative to `folder`, and one that matches a folder
    /// matches everything in it.
    ///
    /// # Errors
    /// The first pattern that is none, with the reason.
    pub fn new(patterns: &[String], folder: &Path) -> Result<Self, globset::Error> {
        let mut set = GlobSetBuilder::new();
        for pattern in patterns {
            let whole = if pattern.starts_with('/') {
                pattern.clone()
            } else {
                // What is special in the folder's name stands for itself.
                let folder = escape(&folder.to_string_lossy());
                format!("{}/{pattern}", folder.trim_end_matches('/'))
            };
            let whole = whole.trim_end_matches('/');
            for one in [whole.to_owned(), format!("{whole}/**")] {
                set.add(GlobBuilder::new(&one).literal_separator(true).build()?);
            }
        }
        Ok(Self { set: set.build()? })
    }

    /// Returns true if a pattern matches the path, or a folder that it is in.
    #[must_use]
    pub fn matches(&self, path: &Path) -> bool {
        self.set.is_match(path)
    }
}

fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for char in text.chars() {
        if "*?[]{}\\".contains(char) {
            escaped.push('\\');
        }
        escaped.push(char);
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_relative_to_the_folder_and_take_what_is_in_folders() {
        let patterns = ["*.pt", "cache", "/data/**/x"].map(str::to_owned);
        let patterns = Patterns::new(&patterns, Path::new("/w[1]")).unwrap();
        let matched = |path: &str| patterns.matches(Path::new(path));
        for path in [
            "/w[1]/a.pt",
            "/w[1]/cache",
            "/w[1]/cache/a/b",
            "/data/1/2/x",
        ] {
            assert!(matched(path), "{path}");
        }
        for path in ["/w[1]/d/a.pt", "/w1/a.pt", "/a.pt", "/data/y"] {
            assert!(!matched(path), "{path}");
        }
    }
}
