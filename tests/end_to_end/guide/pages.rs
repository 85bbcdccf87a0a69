//! Pages of the documentation, and their testable parts.

use std::fs;
use std::path::{Path, PathBuf};

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

/// Page of the repository.
pub struct Page {
    pub path: PathBuf,
    /// Code blocks, in order.
    pub blocks: Vec<Block>,
    /// Inline code.
    pub spans: Vec<String>,
    /// Targets of links, as written.
    pub links: Vec<String>,
    /// Anchors of the page.
    pub anchors: Vec<String>,
}

/// Fenced code block.
pub struct Block {
    /// Text after the fence: `sh run`.
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

/// Returns README and the guide's pages.
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

/// Returns a heading's anchor, as the usual renderers name it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter_map(|letter| match letter {
        ' ' => Some('-'),
        '-' | '_' => Some(letter),
        _ if letter.is_alphanumeric() => Some(letter.to_ascii_lowercase()),
        _ => None,
    });
    kept.collect()
}
