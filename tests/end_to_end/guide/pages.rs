//! The pages, and what of them can be right or wrong.

use std::fs;
use std::path::{Path, PathBuf};

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

/// A page of the repository.
pub struct Page {
    pub path: PathBuf,
    /// Blocks of code, in order.
    pub blocks: Vec<Block>,
    /// Code within sentences.
    pub spans: Vec<String>,
    /// Where links lead, as they are written.
    pub links: Vec<String>,
    /// What a link to a part of the page can name.
    pub anchors: Vec<String>,
}

/// A fenced block of code.
pub struct Block {
    /// What stands after the fence: `sh run`.
    pub info: String,
    pub text: String,
}

impl Block {
    pub fn has(&self, word: &str) -> bool {
        self.info.split_whitespace().any(|one| one == word)
    }
}

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// README and the guide.
pub fn all() -> Vec<Page> {
    let guide = fs::read_dir(root().join("docs/guide")).unwrap();
    let mut paths: Vec<PathBuf> = guide.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    paths.push(root().join("README.md"));
    paths.sort();
    assert!(paths.len() > 10, "{paths:?}");
    paths.iter().map(|path| read(path)).collect()
}

pub fn guide(name: &str) -> Page {
    read(&root().join("docs/guide").join(name))
}

pub fn read(path: &Path) -> Page {
    let text = fs::read_to_string(path).unwrap();
    let mut page = Page {
        path: path.strip_prefix(root()).unwrap().to_owned(),
        blocks: vec![],
        spans: vec![],
        links: vec![],
        anchors: vec![],
    };
    let (mut in_block, mut heading) = (false, None::<String>);
    for event in Parser::new_ext(&text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::CodeBlock(kind)) => {
                in_block = true;
                let info = match kind {
                    CodeBlockKind::Fenced(info) => info.to_string(),
                    CodeBlockKind::Indented => "text".to_owned(),
                };
                let text = String::new();
                page.blocks.push(Block { info, text });
            }
            Event::End(TagEnd::CodeBlock) => in_block = false,
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                page.anchors.extend(heading.take().as_deref().map(anchor));
            }
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                page.links.push(dest_url.to_string());
            }
            Event::Text(text) if in_block => page.blocks.last_mut().unwrap().text.push_str(&text),
            Event::Text(text) => add(&mut heading, &text),
            Event::Code(code) => {
                add(&mut heading, &code);
                page.spans.push(code.to_string());
            }
            _ => {}
        }
    }
    page
}

fn add(heading: &mut Option<String>, text: &str) {
    if let Some(heading) = heading {
        heading.push_str(text);
    }
}

/// As the usual renderers name a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter_map(|letter| match letter {
        ' ' => Some('-'),
        '-' | '_' => Some(letter),
        _ if letter.is_alphanumeric() => Some(letter.to_ascii_lowercase()),
        _ => None,
    });
    kept.collect()
}
