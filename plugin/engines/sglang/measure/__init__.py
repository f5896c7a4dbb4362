"""What must stay free beside the pool: SGLang's worst steps, run after capture and measured."""
