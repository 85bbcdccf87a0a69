//! Path patterns of the settings `files.include`, `files.exclude` and `files.shared`.

use std::path::{Path, PathBuf};

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

/// Patterns of paths. `*` and `?` match within a name, `**` matches folders.
#[derive(Clone, Debug, Default)]
pub struct Patterns {
    set: GlobSet,
    roots: Vec<PathBuf>,
}

impl Patterns {
    /// Parses the patterns. A pattern that does not begin with `/` or `~/` is relative to `folder`. A pattern that
    /// matches a folder matches everything in it.
    ///
    /// # Errors
    /// The first invalid pattern, with the reason.
    pub fn new(patterns: &[String], folder: &Path) -> Result<Self, globset::Error> {
        let mut set = GlobSetBuilder::new();
        let mut roots = Vec::new();
        for pattern in patterns {
            let (base, rest) = split(pattern, folder);
            let whole = format!(
                "{}/{rest}",
                escape(base.to_string_lossy().trim_end_matches('/'))
            );
            let whole = whole.trim_end_matches('/');
            roots.push(base.join(root(rest)).components().collect());
            for one in [whole.to_owned(), format!("{whole}/**")] {
                set.add(GlobBuilder::new(&one).literal_separator(true).build()?);
            }
        }
        let set = set.build()?;
        Ok(Self { set, roots })
    }

    /// Returns folders that contain everything a pattern can match.
    #[must_use]
    pub fn roots(&self) -> &[PathBuf] {
        &self.roots
    }

    /// Returns true if a pattern matches the path or a folder above it.
    #[must_use]
    pub fn matches(&self, path: &Path) -> bool {
        // Both the path and the folder in a pattern are converted to text, because neither need be UTF-8.
        self.set.is_match(&*path.to_string_lossy())
    }
}

/// Splits a pattern into the folder that it is relative to and the rest.
fn split<'a>(pattern: &'a str, folder: &Path) -> (PathBuf, &'a str) {
    if let Some(rest) = pattern.strip_prefix("~/") {
        return (std::env::home_dir().unwrap_or_default(), rest);
    }
    match pattern.strip_prefix('/') {
        Some(rest) => (PathBuf::from("/"), rest),
        None => (folder.to_owned(), pattern),
    }
}

/// Returns the folder names of a relative pattern before the first special character.
fn root(pattern: &str) -> PathBuf {
    let is_special = |name: &&str| name.contains(['*', '?', '[', '{', '\\']);
    pattern
        .split('/')
        .take_while(|name| !is_special(name))
        .collect()
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
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn patterns_are_relative_to_the_folder_and_match_its_files() {
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
        let roots = patterns.roots().iter().map(|root| root.to_str().unwrap());
        assert_eq!(roots.collect::<Vec<_>>(), ["/w[1]", "/w[1]/cache", "/data"]);
        for path in ["/w[1]/d/a.pt", "/w1/a.pt", "/a.pt", "/data/y"] {
            assert!(!matched(path), "{path}");
        }
    }

    #[test]
    fn a_folder_whose_name_is_not_utf_8_has_patterns() {
        let folder = Path::new(OsStr::from_bytes(b"/w\xe9"));
        let patterns = Patterns::new(&["*.pt".to_owned()], folder).unwrap();
        assert!(patterns.matches(&folder.join("a.pt")));
        assert!(patterns.matches(&folder.join(OsStr::from_bytes(b"\xff.pt"))));
        assert!(!patterns.matches(&folder.join("a")));
        assert_eq!(patterns.roots(), [folder]);
    }
}
