"""BERT pre-training rows: the jobs behind `python -m hetseq.preprocessing.bert_corpus`."""
